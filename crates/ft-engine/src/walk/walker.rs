//! The walk over one model.

use super::execution::{Dequantize, Execution, Inputs, Recomputed};
use super::routing::{RouterLosses, Routing};
use super::times::{Part, Times};
use super::visit::{Hooks, NoHooks, Outline, Pass};
use crate::model::batch::Context;
use crate::model::head::{Head, Objective};
use crate::model::layer::{self, Layer, Level};
use crate::model::sink::Sink;
use crate::model::{Batch, Decoder};
use crate::ranks::Comm;
use candle_core::{Device, Result};
use ft_base::memory::place::{self, Phase};
use ft_kernels::Tensor;
use ft_kernels::crossing::Parked;
use ft_kernels::dispatch::Groups;
use ft_kernels::padded::Padded;

/// State of a layer between forward and backward.
struct Saved {
    /// Input of the layer.
    x: Parked,
    /// Recompute level.
    level: Level,
    /// Saved activations.
    rest: layer::Saved,
}

/// Starts the transfer of the next layer input needed in the backward pass.
fn prefetch(kept: &mut [Option<Saved>], device: &Device) -> Result<()> {
    match kept.last_mut() {
        Some(Some(next)) => next.x.come(device),
        _ => Ok(()),
    }
}

/// For a recomputed layer with 4-bit weights: a copy with dequantized weights, if `dequantize` is per layer.
pub fn dequantized_layer(
    layer: &Layer,
    dequantize: Dequantize,
    level: Level,
    routing: Option<&Groups>,
) -> Result<Option<Layer>> {
    let twice = level >= Level::FeedForward && layer.is_packed();
    match dequantize {
        Dequantize::PerLayer if twice => layer.dequantized(level, routing).map(Some),
        _ => Ok(None),
    }
}

/// Test hook, called at every unit.
#[cfg(test)]
pub(super) type Watch<'a> = &'a mut dyn FnMut(Option<Phase>, usize);

/// The walk over one model.
pub struct Walk<'a> {
    pub(super) decoder: &'a Decoder,
    /// Lowest unit that trains; `None` when nothing does.
    pub(super) lowest: Option<usize>,
    /// Recomputed layers.
    recompute: Recomputed,
    /// Dequantization of 4-bit weights in recomputed layers.
    dequantize: Dequantize,
    /// Targets per logit chunk.
    head_rows: usize,
    #[cfg(test)]
    watch: Option<Watch<'a>>,
    times: Option<&'a mut Times>,
    pub(super) hooks: &'a dyn Hooks,
    /// Location of the inputs of recomputed layers.
    inputs: Inputs,
    router_losses: RouterLosses,
    neftune: f64,
    objective: Option<&'a mut Objective<'a>>,
    routing: Routing,
    divergences: Vec<Tensor>,
}

impl<'a> Walk<'a> {
    /// A walk that trains down to unit `lowest` and recomputes the given layers.
    pub fn new(decoder: &'a Decoder, lowest: Option<usize>, recompute: impl Into<Recomputed>) -> Self {
        Self {
            decoder,
            lowest,
            recompute: recompute.into(),
            dequantize: Dequantize::default(),
            head_rows: Head::chunk_rows(decoder.head.vocab, !decoder.embedding.table.device().is_cpu()),
            #[cfg(test)]
            watch: None,
            times: None,
            hooks: &NoHooks,
            inputs: Inputs::default(),
            router_losses: RouterLosses::default(),
            neftune: 0.0,
            objective: None,
            routing: Routing::default(),
            divergences: Vec::new(),
        }
    }

    /// A walk with the execution chosen by the plan.
    pub fn chosen(decoder: &'a Decoder, lowest: Option<usize>, c: &Execution) -> Self {
        Self {
            dequantize: c.dequantize,
            head_rows: c.head_rows,
            inputs: c.inputs,
            ..Self::new(decoder, lowest, c.recompute)
        }
    }

    /// Adds router losses to the loss of [`Walk::train`].
    pub fn router_losses(mut self, losses: RouterLosses) -> Self {
        self.router_losses = losses;
        self
    }

    /// Adds NEFTune noise to the embeddings in [`Walk::train`] (`data.neftune`).
    pub fn neftune(mut self, alpha: f64) -> Self {
        self.neftune = alpha;
        self
    }

    /// Weighs the losses of [`Walk::train`] by an objective, in place of the batch's weights.
    pub fn objective(mut self, objective: &'a mut Objective<'a>) -> Self {
        self.objective = Some(objective);
        self
    }

    /// Routing decisions of the last pass.
    pub fn routing(&self) -> &Routing {
        &self.routing
    }

    /// Takes the per-target divergences from the teacher in the last pass; empty without a teacher.
    pub fn take_divergences(&mut self) -> Vec<Tensor> {
        std::mem::take(&mut self.divergences)
    }

    /// Takes the routing decisions of the last pass, to be read later.
    pub fn into_routing(self) -> Routing {
        self.routing
    }

    /// Calls `watch` at every unit.
    #[cfg(test)]
    pub(super) fn watched(mut self, watch: Watch<'a>) -> Self {
        self.watch = Some(watch);
        self
    }

    /// Records the time of a training walk by part in `times`.
    pub fn timed(mut self, times: &'a mut Times) -> Self {
        self.times = Some(times);
        self
    }

    /// Sets the hooks around visits.
    pub fn hooks(mut self, hooks: &'a dyn Hooks) -> Self {
        self.hooks = hooks;
        self
    }

    /// Starts the next visit of a pass.
    fn arrive(&mut self, pass: &Pass<'_>) -> ft_base::Result<()> {
        if let Some(v) = pass.arrive()? {
            self.at(v.phase, v.unit);
        }
        Ok(())
    }

    /// Adds the time since the last call to `part`.
    fn lap(&mut self, part: Part) -> Result<()> {
        match &mut self.times {
            Some(t) => t.lap(part, self.decoder.embedding.table.device()),
            None => Ok(()),
        }
    }

    /// Records the unit for memory and error reports: 0 is the embedding, then the layers, then the head.
    /// `None` continues the current phase.
    pub(super) fn at(&mut self, phase: Option<Phase>, unit: usize) {
        match phase {
            Some(phase) => place::enter(phase, unit),
            None => place::at_unit(unit),
        }
        #[cfg(test)]
        if let Some(watch) = &mut self.watch {
            watch(phase, unit);
        }
    }

    /// Recompute level of layer `l`; `None` below the lowest trained unit.
    pub(super) fn kept_level(&self, l: usize) -> Option<Level> {
        let lowest = self.lowest.filter(|lowest| l + 1 >= *lowest)?;
        Some(self.recompute.level(l - lowest.saturating_sub(1)))
    }

    /// The cause of an error: a collective inside a layer fails because a rank is lost.
    pub(super) fn cause(&self, e: ft_base::Error) -> ft_base::Error {
        self.hooks.experts().and_then(Comm::lost).map_or(e, Into::into)
    }

    /// State to save of layer `l`; `None` for layers below the lowest trained unit.
    fn keep(&self, l: usize, x: &Tensor, saved: layer::Saved) -> Result<Option<Saved>> {
        let Some(level) = self.kept_level(l) else { return Ok(None) };
        let rest = saved.keep(level);
        // the topmost layer is needed first in the backward pass and stays on the device
        let parks = self.inputs.on_host && level > Level::None && l + 1 < self.decoder.layers.len();
        let x = if parks { Parked::leave(x.clone(), self.inputs.pin)? } else { Parked::here(x.clone()) };
        Ok(Some(Saved { x, level, rest }))
    }

    /// Runs layer `l` forward and records its routing.
    fn layer(&mut self, l: usize, x: &Tensor, context: &Context<'_>) -> Result<(Tensor, layer::Saved)> {
        let (y, saved) = self.decoder.layers[l].forward(x, context, None, None)?;
        if let Some(routed) = saved.routed() {
            self.routing.note(l, routed, self.router_losses)?;
        }
        Ok((y, saved))
    }

    /// Forward and backward pass of one micro-batch. Returns the loss of each target, the cross-entropy if it has a
    /// teacher; adds the gradients of `scale * sum(weights * losses)` and of the router losses to the sink.
    pub fn train(&mut self, batch: &Batch, scale: f64, sink: &Sink<'_>) -> ft_base::Result<Vec<Tensor>> {
        let outcome = self.train_all(batch, scale, sink);
        outcome.map_err(|e| self.cause(e))
    }

    fn train_all(&mut self, batch: &Batch, scale: f64, sink: &Sink<'_>) -> ft_base::Result<Vec<Tensor>> {
        let context = batch.context.among(self.hooks.experts());
        let decoder = self.decoder;
        let mut pass = Pass::begin(Outline::of(decoder).training(self.lowest), self.hooks)?;
        let device = decoder.embedding.table.real()?.device();
        self.lap(Part::Data)?;
        self.routing = Routing::default();
        let (x, mut kept) = self.forward_saving(&mut pass, batch, &context)?;
        self.lap(Part::Forward)?;

        self.arrive(&pass)?;
        let by = (scale, self.objective.as_deref_mut());
        let out = decoder.head.train(&x, batch, self.head_rows, by, sink)?;
        self.lap(Part::Head)?;
        self.divergences = out.divergences;
        drop(x);
        pass.leave()?;
        let Some(dy) = out.dx else { return Ok(out.losses) };
        let mut dy = Padded::of(&dy)?;
        // available only after the whole forward pass: the load-balancing loss
        // couples the routers of all layers
        if let Some(across) = batch.context.across {
            self.routing.share(across, self.router_losses)?;
        }
        let balance = self.routing.balance(self.router_losses)?;

        for (l, layer) in decoder.layers.iter().enumerate().rev() {
            let below = l.checked_sub(1).filter(|b| Some(b + 1) >= self.lowest).map(|b| &decoder.layers[b]);
            let rank = below.map_or(0, |b| b.fused_rank_back(dy.all(), &context));
            let Some(Some(Saved { x, level, rest })) = kept.pop() else { return Ok(out.losses) };
            self.arrive(&pass)?;
            let x = x.take(device)?;
            prefetch(&mut kept, device)?;
            let dequantized = dequantized_layer(layer, self.dequantize, level, rest.routing().as_deref())?;
            let layer = dequantized.as_ref().unwrap_or(layer);
            let saved = layer.recompute(&x, &context, level, rest)?;
            if level > Level::None {
                self.lap(Part::Recompute)?;
            }
            dy = layer.backward((&x, saved), &dy, &context, sink, balance.as_ref(), rank)?;
            drop((dequantized, x));
            pass.leave()?;
            self.lap(Part::Backward)?;
        }
        if decoder.embedding.trains() {
            self.arrive(&pass)?;
            decoder.embedding.backward(batch, &context, self.neftune, &dy.values()?, sink)?;
            pass.leave()?;
            self.lap(Part::Backward)?;
        }
        Ok(out.losses)
    }

    /// Forward pass of embedding and layers: returns the final hidden states `[t, d]` and the state of each
    /// layer.
    fn forward_saving(
        &mut self,
        pass: &mut Pass<'_>,
        batch: &Batch,
        context: &Context<'_>,
    ) -> ft_base::Result<(Tensor, Vec<Option<Saved>>)> {
        let decoder = self.decoder;
        let mut kept: Vec<Option<Saved>> = Vec::with_capacity(decoder.layers.len());
        self.arrive(pass)?;
        let mut x = batch.noisy(decoder.embedding.forward(&batch.ids)?, self.neftune)?;
        decoder.embedding.begin(&x, &batch.ids, context)?;
        pass.leave()?;
        for l in 0..decoder.layers.len() {
            self.arrive(pass)?;
            let (y, saved) = self.layer(l, &x, context)?;
            if let Some(Some(below)) = kept.last_mut() {
                below.x.gone()?;
            }
            kept.push(self.keep(l, &x, saved)?);
            x = y;
            pass.leave()?;
        }
        Ok((x, kept))
    }

    /// Forward pass to the final hidden states `[t, d]`, then `head` on them.
    fn forward<R>(
        &mut self,
        batch: &Batch,
        head: impl FnOnce(&Self, &Tensor) -> Result<R>,
    ) -> ft_base::Result<R> {
        let outcome = self.forward_all(batch, head);
        outcome.map_err(|e| self.cause(e))
    }

    fn forward_all<R>(
        &mut self,
        batch: &Batch,
        head: impl FnOnce(&Self, &Tensor) -> Result<R>,
    ) -> ft_base::Result<R> {
        let context = batch.context.among(self.hooks.experts());
        let decoder = self.decoder;
        let mut pass = Pass::begin(Outline::of(decoder).forward(), self.hooks)?;
        self.routing = Routing::default();
        self.arrive(&pass)?;
        let mut x = decoder.embedding.forward(&batch.ids)?;
        decoder.embedding.begin(&x, &batch.ids, &context)?;
        pass.leave()?;
        for l in 0..decoder.layers.len() {
            self.arrive(&pass)?;
            x = self.layer(l, &x, &context)?.0;
            pass.leave()?;
        }
        self.arrive(&pass)?;
        let out = head(self, &x)?;
        pass.leave()?;
        Ok(out)
    }

    /// Final hidden states `[t, d]`, the input of the head.
    pub fn hidden(&mut self, batch: &Batch) -> ft_base::Result<Tensor> {
        self.forward(batch, |_, x| Ok(x.clone()))
    }

    /// Loss of each target, forward only.
    pub fn eval(&mut self, batch: &Batch) -> ft_base::Result<Vec<Tensor>> {
        let losses = |w: &Self, x: &Tensor| w.decoder.head.loss(x, batch, w.head_rows, None);
        let out = self.forward(batch, losses)?;
        self.divergences = out.divergences;
        Ok(out.losses)
    }

    /// The most probable tokens at each target: see [`Head::top`].
    pub fn top(&mut self, batch: &Batch, most: (usize, usize)) -> ft_base::Result<Vec<Vec<(u32, f32)>>> {
        self.forward(batch, |w, x| w.decoder.head.top(x, batch, w.head_rows, most))
    }

    /// Logits of every token, `[t, v]` in f32.
    pub fn logits(&mut self, batch: &Batch) -> ft_base::Result<Tensor> {
        self.forward(batch, |w, x| w.decoder.head.logits(x, &batch.context))
    }
}
