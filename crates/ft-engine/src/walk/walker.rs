//! The walk over one model.

use super::execution::{Dequantize, Execution, Inputs, Recomputed};
use super::routing::{RouterLosses, Routing};
use super::stage::StageExchange;
use super::times::{Part, Times};
use super::visit::{Hooks, NoHooks, Outline, Visits};
use crate::model::head::{Head, Objective};
use crate::model::layer::{Layer, Level};
use crate::model::{Batch, Decoder};
use crate::ranks::Comm;
use candle_core::Result;
use ft_base::memory::place::{self, Phase};
use ft_kernels::Tensor;
use ft_kernels::dispatch::Groups;
use std::sync::Arc;

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
    pub(super) dequantize: Dequantize,
    /// Targets per logit chunk.
    pub(super) head_rows: usize,
    #[cfg(test)]
    watch: Option<Watch<'a>>,
    times: Option<&'a mut Times>,
    pub(super) hooks: &'a dyn Hooks,
    /// Location of the inputs of recomputed layers.
    pub(super) inputs: Inputs,
    pub(super) router_losses: RouterLosses,
    pub(super) neftune: f64,
    pub(super) objective: Option<&'a mut Objective<'a>>,
    pub(super) routing: Routing,
    pub(super) divergences: Vec<Tensor>,
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
    pub(super) fn start_visit(&mut self, pass: &Visits<'_>) -> ft_base::Result<()> {
        if let Some(v) = pass.start_visit()? {
            self.at(v.phase, v.unit);
        }
        Ok(())
    }

    /// Adds the time since the last call to `part`.
    pub(super) fn lap(&mut self, part: Part) -> Result<()> {
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

    /// Recompute level of layer `l`, counted from the lowest layer here in the backward pass; `None` below the lowest
    /// trained unit.
    pub(super) fn kept_level(&self, l: usize) -> Option<Level> {
        let lowest = self.lowest.filter(|lowest| l + 1 >= *lowest)?.max(self.decoder.units.first);
        Some(self.recompute.level(l - lowest.saturating_sub(1)))
    }

    /// The cause of an error: a collective inside a layer fails because a rank is lost.
    pub(super) fn cause(&self, e: ft_base::Error) -> ft_base::Error {
        self.hooks.experts().and_then(Comm::lost).map_or(e, Into::into)
    }

    /// Forward pass to the final hidden states `[t, d]`, then `head` on them; `None` on a stage without the head.
    fn forward<R>(
        &mut self,
        batch: &Batch,
        head: impl FnOnce(&Self, &Tensor) -> Result<R>,
    ) -> ft_base::Result<Option<R>> {
        let outcome = self.forward_all(batch, head);
        outcome.map_err(|e| self.cause(e))
    }

    fn forward_all<R>(
        &mut self,
        batch: &Batch,
        head: impl FnOnce(&Self, &Tensor) -> Result<R>,
    ) -> ft_base::Result<Option<R>> {
        let decoder = self.decoder;
        let mut pass = Visits::begin(Outline::of(decoder).forward(), self.hooks)?;
        let shared_state = Arc::default();
        let context = batch.context.for_pass(&shared_state, self.hooks.experts());
        let mut routing = Routing::default();
        let mut x = match self.hooks.stage().filter(|_| !decoder.units.has_embedding()) {
            Some(stage) => {
                let mut came = stage.receive(batch.rows())?;
                let x = came.remove(0);
                stage.boundary(false).set_forward_tensors(&shared_state, came)?;
                x
            }
            None => {
                self.start_visit(&pass)?;
                let x = decoder.embedding.forward(&batch.ids)?;
                decoder.embedding.begin(&x, &batch.ids, &context)?;
                pass.end_visit()?;
                x
            }
        };
        for l in decoder.units.own_layers() {
            self.start_visit(&pass)?;
            x = self.layer(l, &x, &context, &mut routing)?.0;
            pass.end_visit()?;
        }
        self.routing = routing;
        if let Some(stage) = self.hooks.stage().filter(|_| !decoder.units.has_head()) {
            let mut out = vec![x];
            out.extend(stage.boundary(true).forward_tensors(&shared_state)?);
            stage.exchange(true, StageExchange { out: Some(out), into: None })?;
            return Ok(None);
        }
        self.start_visit(&pass)?;
        let out = head(self, &x)?;
        pass.end_visit()?;
        Ok(Some(out))
    }

    /// Final hidden states `[t, d]`, the input of the head. Of a whole model.
    pub fn hidden(&mut self, batch: &Batch) -> ft_base::Result<Tensor> {
        self.forward(batch, |_, x| Ok(x.clone()))?.ok_or_else(no_head)
    }

    /// Loss of each target, forward only; none on a stage without the head.
    pub fn eval(&mut self, batch: &Batch) -> ft_base::Result<Vec<Tensor>> {
        let losses = |w: &Self, x: &Tensor| w.decoder.head.loss(x, batch, w.head_rows, None);
        let out = self.forward(batch, losses)?.unwrap_or_default();
        self.divergences = out.divergences;
        Ok(out.losses)
    }

    /// The most probable tokens at each target: see [`Head::top`].
    pub fn top(&mut self, batch: &Batch, most: (usize, usize)) -> ft_base::Result<Vec<Vec<(u32, f32)>>> {
        Ok(self.forward(batch, |w, x| w.decoder.head.top(x, batch, w.head_rows, most))?.unwrap_or_default())
    }

    /// Logits of every token, `[t, v]` in f32.
    pub fn logits(&mut self, batch: &Batch) -> ft_base::Result<Tensor> {
        self.stage_logits(batch)?.ok_or_else(no_head)
    }

    /// As [`Walk::logits`], with all stages; `None` on a stage without the head.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn stage_logits(&mut self, batch: &Batch) -> ft_base::Result<Option<Tensor>> {
        self.forward(batch, |w, x| w.decoder.head.logits(x, &batch.context))
    }
}

/// A pass asked for the head's output of a stage without the head.
fn no_head() -> ft_base::Error {
    candle_core::Error::Msg("a stage without the head: a bug in ft".into()).into()
}
