//! A micro-batch: up through the units of a rank, the head, and in training down again.

use super::idle::IdleState;
use super::routing::Routing;
use super::stage::StageExchange;
use super::times::Part;
use super::visit::{Hooks, Outline, Visits};
use super::walker::{Walk, dequantized_layer};
use crate::model::batch::Context;
use crate::model::grad_accumulator::GradAccumulator;
use crate::model::head::Output;
use crate::model::layer::{self, Level};
use crate::model::shared_state::SharedState;
use crate::model::{Batch, Decoder};
use candle_core::{Device, Result};
use ft_kernels::Tensor;
use ft_kernels::crossing::Offloaded;
use ft_kernels::padded::Padded;
use std::sync::Arc;

/// State of a layer between forward and backward.
struct Saved {
    /// Input of the layer.
    x: Offloaded,
    /// Recompute level.
    level: Level,
    /// Saved activations.
    rest: layer::Saved,
}

/// Starts the transfer of the next layer input needed in the backward pass.
fn prefetch(kept: &mut [Saved], device: &Device) -> Result<()> {
    kept.last_mut().map_or(Ok(()), |next| next.x.prefetch(device))
}

/// State of a micro-batch after forward, for backward.
pub struct Pass<'a> {
    pub(super) visits: Visits<'a>,
    /// State of each layer passed upwards, from the lowest trained one.
    kept: Vec<Saved>,
    /// Routing decisions.
    pub routing: Routing,
    /// State between layers.
    shared_state: Arc<SharedState>,
    /// Experts of the layers on the rows of other ranks, on a rank without rows.
    pub(super) idle: Vec<Option<IdleState>>,
}

impl<'a> Pass<'a> {
    /// State between layers, a part of which crosses the boundaries of a stage: see
    /// [`StageBoundary`](crate::model::stage_boundary::StageBoundary).
    pub fn shared_state(&self) -> &SharedState {
        &self.shared_state
    }

    fn new(visits: Visits<'a>) -> Self {
        let (routing, shared_state) = (Routing::default(), Arc::default());
        Self { visits, kept: Vec::new(), routing, shared_state, idle: Vec::new() }
    }

    /// Begins the pass of a micro-batch down to unit `lowest`.
    ///
    /// # Errors
    /// A lost rank.
    pub fn begin(decoder: &Decoder, lowest: Option<usize>, hooks: &'a dyn Hooks) -> ft_base::Result<Self> {
        let visits = Visits::begin(Outline::of(decoder).training(lowest), hooks)?;
        let visits = if decoder.units.has_head() { visits } else { visits.pausing() };
        let kept = Vec::with_capacity(decoder.units.own_layers().len());
        Ok(Self { kept, ..Self::new(visits) })
    }
}

impl<'a> Walk<'a> {
    /// The context of both directions of a pass.
    fn context<'b>(&self, pass: &Pass<'_>, batch: &Batch<'b>) -> Context<'b>
    where
        'a: 'b,
    {
        batch.context.for_pass(&pass.shared_state, self.hooks.experts())
    }

    /// State to save of layer `l`; `None` for layers below the lowest trained unit.
    fn keep(&self, l: usize, x: &Tensor, saved: layer::Saved) -> Result<Option<Saved>> {
        let Some(level) = self.kept_level(l) else { return Ok(None) };
        let rest = saved.keep(level);
        // the topmost layer is needed first in the backward pass and stays on the device
        let offloads =
            self.inputs.on_host && level > Level::None && l + 1 < self.decoder.units.own_layers().end;
        let x = if offloads {
            Offloaded::offload(x.clone(), self.inputs.pin)?
        } else {
            Offloaded::here(x.clone())
        };
        Ok(Some(Saved { x, level, rest }))
    }

    /// Forward pass of embedding and layers: returns the hidden states `[t, d]` above them. `below` has the hidden
    /// states below the lowest layer, on a rank without the embedding.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn forward_layers(
        &mut self,
        pass: &mut Pass<'_>,
        batch: &Batch<'_>,
        below: Option<Tensor>,
    ) -> ft_base::Result<Tensor> {
        let context = self.context(pass, batch);
        let decoder = self.decoder;
        self.lap(Part::Data)?;
        let mut x = match below {
            Some(x) => x,
            None => {
                self.start_visit(&pass.visits)?;
                let x = batch.noisy(decoder.embedding.forward(&batch.ids)?, self.neftune)?;
                decoder.embedding.begin(&x, &batch.ids, &context)?;
                pass.visits.end_visit()?;
                x
            }
        };
        for l in decoder.units.own_layers() {
            self.start_visit(&pass.visits)?;
            let (y, saved) = decoder.layers[l].forward(&x, &context, None, None)?;
            if let Some(routed) = saved.routed() {
                pass.routing.note(l, routed, (self.router_losses, context.has_placeholder_row()))?;
            }
            if let Some(below) = pass.kept.last_mut() {
                below.x.release()?;
            }
            pass.kept.extend(self.keep(l, &x, saved)?);
            x = y;
            pass.visits.end_visit()?;
        }
        self.lap(Part::Forward)?;
        Ok(x)
    }

    /// The head, forward and backward, on the final hidden states `x` `[t, d]`.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn head(
        &mut self,
        pass: &mut Pass<'_>,
        batch: &Batch<'_>,
        x: Tensor,
        (scale, accum): (f64, &GradAccumulator<'_>),
    ) -> ft_base::Result<Output> {
        self.start_visit(&pass.visits)?;
        let by = (scale, self.objective.as_deref_mut());
        let out = self.decoder.head.train(&x, batch, self.head_rows, by, accum)?;
        self.lap(Part::Head)?;
        drop(x);
        pass.visits.end_visit()?;
        Ok(out)
    }

    /// Backward pass of layers and embedding, from the gradient `dy` `[t, d]` above them. Returns the gradient below
    /// the lowest layer, on a rank without the embedding.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn backward_layers(
        &mut self,
        pass: &mut Pass<'_>,
        batch: &Batch<'_>,
        dy: &Tensor,
        accum: &GradAccumulator<'_>,
    ) -> ft_base::Result<Option<Tensor>> {
        let context = self.context(pass, batch);
        let decoder = self.decoder;
        let device = decoder.embedding.table.real()?.device();
        let mut dy = Padded::of(dy)?;
        // available only after the whole forward pass: the load-balancing loss
        // couples the routers of all layers
        pass.routing.share(batch.context.micro_batch_group.as_deref(), self.router_losses)?;
        let balance =
            if context.has_placeholder_row() { None } else { pass.routing.balance(self.router_losses)? };

        let own = decoder.units.own_layers();
        for l in own.clone().rev() {
            let layer = &decoder.layers[l];
            let is_here = |b: &usize| own.contains(b) && Some(b + 1) >= self.lowest;
            let below = l.checked_sub(1).filter(is_here).map(|b| &decoder.layers[b]);
            let rank = below.map_or(0, |b| b.fused_rank_back(dy.all(), &context));
            let Some(Saved { x, level, rest }) = pass.kept.pop() else { return Ok(None) };
            self.start_visit(&pass.visits)?;
            let x = x.take(device)?;
            prefetch(&mut pass.kept, device)?;
            let dequantized = dequantized_layer(layer, self.dequantize, level, rest.routing().as_deref())?;
            let layer = dequantized.as_ref().unwrap_or(layer);
            let saved = layer.recompute(&x, &context, level, rest)?;
            if level > Level::None {
                self.lap(Part::Recompute)?;
            }
            dy = layer.backward((&x, saved), &dy, &context, accum, balance.as_ref(), rank)?;
            drop((dequantized, x));
            pass.visits.end_visit()?;
            self.lap(Part::Backward)?;
        }
        if !decoder.units.has_embedding() {
            return dy.values().map(Some).map_err(Into::into);
        }
        if decoder.embedding.trains() {
            self.start_visit(&pass.visits)?;
            decoder.embedding.backward(batch, &context, self.neftune, &dy.values()?, accum)?;
            pass.visits.end_visit()?;
            self.lap(Part::Backward)?;
        }
        Ok(None)
    }

    /// Forward and backward pass of one micro-batch. Returns the loss of each target, the cross-entropy if it has a
    /// teacher; adds the gradients of `scale * sum(weights * losses)` and of the router losses to the accumulator.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn train(
        &mut self,
        batch: &Batch<'_>,
        scale: f64,
        accum: &GradAccumulator<'_>,
    ) -> ft_base::Result<Vec<Tensor>> {
        let outcome = self.train_all(batch, scale, accum);
        outcome.map_err(|e| self.cause(e))
    }

    fn train_all(
        &mut self,
        batch: &Batch<'_>,
        scale: f64,
        accum: &GradAccumulator<'_>,
    ) -> ft_base::Result<Vec<Tensor>> {
        let mut pass = Pass::begin(self.decoder, self.lowest, self.hooks)?;
        let x = self.forward_layers(&mut pass, batch, None)?;
        let out = self.head(&mut pass, batch, x, (scale, accum))?;
        self.divergences = out.divergences;
        if let Some(dy) = out.dx {
            self.backward_layers(&mut pass, batch, &dy, accum)?;
        }
        self.routing = pass.routing;
        Ok(out.losses)
    }

    /// Forward pass to the final hidden states `[t, d]`, then `head` on them; `None` on a stage without the head.
    /// Of a walk without a lowest unit: with one, activations would be kept.
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
        let mut pass = Pass::new(Visits::begin(Outline::of(decoder).forward(), self.hooks)?);
        let below = match self.hooks.stage().filter(|_| !decoder.units.has_embedding()) {
            Some(stage) => {
                let mut came = stage.receive(batch.rows())?;
                let x = came.remove(0);
                stage.boundary(false).set_forward_tensors(&pass.shared_state, came)?;
                Some(x)
            }
            None => None,
        };
        let x = self.forward_layers(&mut pass, batch, below)?;
        self.routing = pass.routing;
        if let Some(stage) = self.hooks.stage().filter(|_| !decoder.units.has_head()) {
            let mut out = vec![x];
            out.extend(stage.boundary(true).forward_tensors(&pass.shared_state)?);
            stage.exchange(true, StageExchange { out: Some(out), into: None })?;
            return Ok(None);
        }
        self.start_visit(&pass.visits)?;
        let out = head(self, &x)?;
        pass.visits.end_visit()?;
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

    /// The most probable tokens at each target: see [`Head::top`](crate::model::head::Head::top).
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
