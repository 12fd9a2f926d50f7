//! The walk: forward and backward passes over the units of a model, as two explicit loops.
//!
//! ```text
//! forward,  layer l:  layer.forward(x) -> save x, on device or host, and activations of the level
//! head:               loss and its gradient, one logit chunk at a time
//! backward, layer l:  dequantize, recompute the activations not saved -> layer.backward
//! ```

mod execution;
mod finite;
pub mod generate;
mod routing;
#[cfg(test)]
mod tests;
mod times;
pub mod visit;
mod walker;

pub use execution::{Dequantize, Execution, Inputs, Recomputed};
pub use finite::{NotFinite, finite};
pub use routing::{HostRouting, Load, RouterLosses, Routing, dead, entropy, peak};
pub use times::{Part, Times};
pub use visit::{Around, Nothing, Outline, Visit};

use crate::model::head::Head;
use crate::model::layer::{self, Layer, Level};
use crate::model::sink::Sink;
use crate::model::{Batch, Decoder};
use candle_core::{DType, Device, Result};
use ft_base::error::{ExitCode, Failure};
use ft_base::memory::place::{self, Phase};
use ft_kernels::crossing::Parked;
use ft_kernels::dispatch::Groups;
use ft_kernels::padded::Padded;
use ft_kernels::{Real, Tensor};
use ft_kernels::{optimizer, to_host};
use visit::Pass;

/// NaN or infinite logits.
#[derive(Debug, thiserror::Error)]
#[error("{what}: the logits are not finite\n  {hint}")]
pub struct NotFinite {
    /// Source of the logits.
    pub what: String,
    /// Line with a hint for the user.
    pub hint: &'static str,
}

impl Failure for NotFinite {
    fn exit_code(&self) -> ExitCode {
        ExitCode::NonFinite
    }
}

/// Returns an error if logits are NaN or infinite; `what` names their source.
///
/// # Errors
/// [`NotFinite`].
pub fn finite(logits: &Real, what: &str, hint: &'static str) -> ft_base::Result<()> {
    let logits = Tensor::Real(to_host(&logits.to_dtype(DType::F32)?)?);
    match optimizer::finite(&logits)? {
        true => Ok(()),
        false => Err(NotFinite { what: what.into(), hint }.into()),
    }
}

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
fn bring(kept: &mut [Option<Saved>], device: &Device) -> Result<()> {
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
type Watch<'a> = &'a mut dyn FnMut(Option<Phase>, usize);

/// The walk over one model.
pub struct Walk<'a> {
    decoder: &'a Decoder,
    /// Lowest unit that trains; `None` when nothing does.
    lowest: Option<usize>,
    /// Recomputed layers.
    recompute: Recomputed,
    /// Dequantization of 4-bit weights in recomputed layers.
    dequantize: Dequantize,
    /// Targets per logit chunk.
    head_rows: usize,
    #[cfg(test)]
    watch: Option<Watch<'a>>,
    times: Option<&'a mut Times>,
    around: &'a dyn Around,
    /// Location of the inputs of recomputed layers.
    inputs: Inputs,
    router_losses: RouterLosses,
    neftune: f64,
    routing: Routing,
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
            around: &Nothing,
            inputs: Inputs::default(),
            router_losses: RouterLosses::default(),
            neftune: 0.0,
            routing: Routing::default(),
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

    /// Routing decisions of the last pass.
    pub fn routing(&self) -> &Routing {
        &self.routing
    }

    /// Takes the routing decisions of the last pass, to be read later.
    pub fn into_routing(self) -> Routing {
        self.routing
    }

    /// Calls `watch` at every unit.
    #[cfg(test)]
    fn watched(mut self, watch: Watch<'a>) -> Self {
        self.watch = Some(watch);
        self
    }

    /// Records the time of a training walk by part in `times`.
    pub fn timed(mut self, times: &'a mut Times) -> Self {
        self.times = Some(times);
        self
    }

    /// Sets the hooks around visits.
    pub fn around(mut self, around: &'a dyn Around) -> Self {
        self.around = around;
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
    fn lap(&mut self, part: times::Part) -> Result<()> {
        match &mut self.times {
            Some(t) => t.lap(part, self.decoder.embedding.table.device()),
            None => Ok(()),
        }
    }

    /// Records the unit for memory and error reports: 0 is the embedding, then the layers, then the head.
    /// `None` continues the current phase.
    fn at(&mut self, phase: Option<Phase>, unit: usize) {
        match phase {
            Some(phase) => place::enter(phase, unit),
            None => place::at_unit(unit),
        }
        #[cfg(test)]
        if let Some(watch) = &mut self.watch {
            watch(phase, unit);
        }
    }

    /// State to save of layer `l`; `None` for layers below the lowest trained unit.
    fn keep(&self, l: usize, x: &Tensor, saved: layer::Saved) -> Result<Option<Saved>> {
        let Some(lowest) = self.lowest.filter(|lowest| l + 1 >= *lowest) else { return Ok(None) };
        let level = self.recompute.level(l - lowest.saturating_sub(1));
        let rest = saved.keep(level);
        // the topmost layer is needed first in the backward pass and stays on the device
        let parks = self.inputs.on_host && level > Level::Nothing && l + 1 < self.decoder.layers.len();
        let x = if parks { Parked::leave(x.clone(), self.inputs.pin)? } else { Parked::here(x.clone()) };
        Ok(Some(Saved { x, level, rest }))
    }

    /// Runs layer `l` forward and records its routing.
    fn layer(&mut self, l: usize, x: &Tensor, batch: &Batch) -> Result<(Tensor, layer::Saved)> {
        let (y, saved) = self.decoder.layers[l].forward(x, &batch.context, None, None)?;
        if let Some(routed) = saved.routed() {
            self.routing.note(l, routed, self.router_losses)?;
        }
        Ok((y, saved))
    }

    /// Forward and backward pass of one micro-batch. Returns the loss of each target; adds the gradients of
    /// `scale * sum(losses)` and of the router losses to the sink.
    pub fn train(&mut self, batch: &Batch, scale: f64, sink: &Sink<'_>) -> ft_base::Result<Vec<Tensor>> {
        let decoder = self.decoder;
        let mut pass = Pass::begin(Outline::of(decoder).training(self.lowest), self.around)?;
        let device = decoder.embedding.table.real()?.device();
        let mut kept: Vec<Option<Saved>> = Vec::with_capacity(decoder.layers.len());
        self.lap(times::Part::Data)?;
        self.routing = Routing::default();

        self.arrive(&pass)?;
        let mut x = batch.noisy(decoder.embedding.forward(&batch.ids)?, self.neftune)?;
        pass.leave()?;
        for l in 0..decoder.layers.len() {
            self.arrive(&pass)?;
            let (y, saved) = self.layer(l, &x, batch)?;
            if let Some(Some(below)) = kept.last_mut() {
                below.x.gone()?;
            }
            kept.push(self.keep(l, &x, saved)?);
            x = y;
            pass.leave()?;
        }

        self.lap(times::Part::Forward)?;

        self.arrive(&pass)?;
        let out = decoder.head.loss(&x, batch, self.head_rows, Some((scale, sink)))?;
        self.lap(times::Part::Head)?;
        drop(x);
        pass.leave()?;
        let Some(dy) = out.dx else { return Ok(out.losses) };
        let mut dy = Padded::of(&dy)?;
        // available only after the whole forward pass: the load-balancing loss
        // couples the routers of all layers
        let balance = self.routing.balance(self.router_losses)?;

        for (l, layer) in decoder.layers.iter().enumerate().rev() {
            let below = l.checked_sub(1).filter(|b| Some(b + 1) >= self.lowest).map(|b| &decoder.layers[b]);
            let rank = below.map_or(0, |b| b.room_back(dy.all(), &batch.context));
            let Some(Some(Saved { x, level, rest })) = kept.pop() else { return Ok(out.losses) };
            self.arrive(&pass)?;
            let x = x.take(device)?;
            bring(&mut kept, device)?;
            let dequantized = dequantized_layer(layer, self.dequantize, level, rest.routing().as_deref())?;
            let layer = dequantized.as_ref().unwrap_or(layer);
            let saved = layer.recompute(&x, &batch.context, level, rest)?;
            if level > Level::Nothing {
                self.lap(times::Part::Recompute)?;
            }
            dy = layer.backward((&x, saved), &dy, &batch.context, sink, balance.as_ref(), rank)?;
            drop((dequantized, x));
            pass.leave()?;
            self.lap(times::Part::Backward)?;
        }
        if decoder.embedding.trains() {
            self.arrive(&pass)?;
            decoder.embedding.backward(batch, &dy.values()?, sink)?;
            pass.leave()?;
            self.lap(times::Part::Backward)?;
        }
        Ok(out.losses)
    }

    /// Forward pass to the final hidden states `[t, d]`, then `head` on them.
    fn forward<R>(
        &mut self,
        batch: &Batch,
        head: impl FnOnce(&Self, &Tensor) -> Result<R>,
    ) -> ft_base::Result<R> {
        let decoder = self.decoder;
        let mut pass = Pass::begin(Outline::of(decoder).forward(), self.around)?;
        self.routing = Routing::default();
        self.arrive(&pass)?;
        let mut x = decoder.embedding.forward(&batch.ids)?;
        pass.leave()?;
        for l in 0..decoder.layers.len() {
            self.arrive(&pass)?;
            x = self.layer(l, &x, batch)?.0;
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
        Ok(self.forward(batch, losses)?.losses)
    }

    /// Logits of every token, `[t, v]` in f32.
    pub fn logits(&mut self, batch: &Batch) -> ft_base::Result<Tensor> {
        self.forward(batch, |w, x| w.decoder.head.logits(x, &batch.context))
    }
}
