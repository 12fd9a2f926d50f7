//! The walk over one model.

use super::execution::{Dequantize, Execution, Inputs, Recomputed};
use super::routing::{RouterLosses, Routing};
use super::times::{Part, Times};
use super::visit::{Hooks, NoHooks, Visits};
use crate::model::Decoder;
use crate::model::head::{Head, Objective};
use crate::model::layer::{Layer, Level};
use crate::ranks::Comm;
use candle_core::Result;
use ft_base::memory::place::{self, Phase};
use ft_kernels::Tensor;
use ft_kernels::dispatch::Groups;

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

    /// Weighs the losses of [`Walk::train`] by an objective, if any, in place of the batch's weights.
    pub fn objective(mut self, objective: Option<&'a mut Objective<'a>>) -> Self {
        self.objective = objective;
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
}
