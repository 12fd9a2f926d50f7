//! The walk over the layers: two visible loops.
//!
//! ```text
//! forward,  layer l:  layer.forward(x) -> save nothing, x and the routing, or all
//! head:               loss and its gradient, some token rows at a time
//! backward, layer l:  dequantize and recompute if only x was saved -> layer.backward
//! ```

mod execution;
pub mod generate;
mod routing;
#[cfg(test)]
mod tests;
mod times;

pub use execution::{Dequantize, Execution};
pub use routing::{Decided, Load, RouterLosses, Routing, dead, entropy, peak};
pub use times::{Part, Times};

use crate::error::{ExitCode, Failure};
use crate::kernel::group::Groups;
use crate::kernel::padded::Padded;
use crate::kernel::{Real, Tensor};
use crate::kernel::{optimizer, to_host};
use crate::log::place::{self, Phase};
use crate::model::head::Head;
use crate::model::layer::{self, Layer};
use crate::model::sink::Sink;
use crate::model::{Batch, Decoder};
use candle_core::{DType, Result};
use std::sync::Arc;

/// Logits that are NaN or infinite.
#[derive(Debug, thiserror::Error)]
#[error("{what}: the logits are not finite\n  {hint}")]
pub struct NotFinite {
    /// What computed them.
    pub what: String,
    /// What to do.
    pub hint: &'static str,
}

impl Failure for NotFinite {
    fn exit_code(&self) -> ExitCode {
        ExitCode::NonFinite
    }
}

/// Refuses logits that are NaN or infinite; `what` computed them.
///
/// # Errors
/// [`NotFinite`].
pub fn finite(logits: &Real, what: &str, hint: &'static str) -> crate::Result<()> {
    let logits = Tensor::Real(to_host(&logits.to_dtype(DType::F32)?)?);
    match optimizer::finite(&logits)? {
        true => Ok(()),
        false => Err(NotFinite { what: what.into(), hint }.into()),
    }
}

/// What is kept of a layer between forward and backward.
enum Saved {
    /// Nothing: backward does not come here.
    Nothing,
    /// Its input, and how its router decided: the rest is computed again.
    Input(Tensor, Option<Arc<Groups>>),
    /// Everything.
    All(Box<layer::Saved>),
}

/// The layer to visit in place of one that is computed again, where its 4-bit weights are dequantized for the visit.
pub fn dequantized_layer(
    layer: &Layer,
    dequantize: Dequantize,
    routing: Option<&Groups>,
) -> Result<Option<Layer>> {
    match dequantize {
        Dequantize::PerLayer if layer.is_packed() => layer.dequantized(routing).map(Some),
        _ => Ok(None),
    }
}

/// Told by the walk where it is.
#[cfg(test)]
type Watch<'a> = &'a mut dyn FnMut(Option<Phase>, usize);

/// Told by the walk that it has left a unit, backward.
pub type Left<'a> = &'a dyn Fn(usize) -> Result<()>;

/// The walk over one model.
pub struct Walk<'a> {
    decoder: &'a Decoder,
    /// Lowest unit that trains; `None` when nothing does.
    lowest: Option<usize>,
    /// Layers, from the lowest that is walked backward, whose activations are computed again.
    recompute: usize,
    /// How 4-bit weights of those layers are dequantized.
    dequantize: Dequantize,
    /// Targets whose logits exist at once.
    head_rows: usize,
    #[cfg(test)]
    watch: Option<Watch<'a>>,
    times: Option<&'a mut Times>,
    left: Option<Left<'a>>,
    router_losses: RouterLosses,
    routing: Routing,
}

impl<'a> Walk<'a> {
    /// A walk down to unit `lowest` that recomputes `recompute` layers.
    pub fn new(decoder: &'a Decoder, lowest: Option<usize>, recompute: usize) -> Self {
        Self {
            decoder,
            lowest,
            recompute,
            dequantize: Dequantize::default(),
            head_rows: Head::chunk_rows(decoder.head.vocab, !decoder.embedding.table.device().is_cpu()),
            #[cfg(test)]
            watch: None,
            times: None,
            left: None,
            router_losses: RouterLosses::default(),
            routing: Routing::default(),
        }
    }

    /// A walk as the plan chose it.
    pub fn chosen(decoder: &'a Decoder, lowest: Option<usize>, c: &Execution) -> Self {
        Self { dequantize: c.dequantize, head_rows: c.head_rows, ..Self::new(decoder, lowest, c.recompute) }
    }

    /// Adds losses on the routers to what [`Walk::train`] takes gradients of.
    pub fn router_losses(mut self, losses: RouterLosses) -> Self {
        self.router_losses = losses;
        self
    }

    /// How the routers decided in the last pass.
    pub fn routing(&self) -> &Routing {
        &self.routing
    }

    /// The same, to be read when there is time.
    pub fn into_routing(self) -> Routing {
        self.routing
    }

    /// Calls `watch` whenever the walk comes to a unit.
    #[cfg(test)]
    fn watched(mut self, watch: Watch<'a>) -> Self {
        self.watch = Some(watch);
        self
    }

    /// Adds the time that each part of a training walk takes to `times`.
    pub fn timed(mut self, times: &'a mut Times) -> Self {
        self.times = Some(times);
        self
    }

    /// Calls `left` whenever the walk leaves a unit, backward: nothing more is added to the gradients of it and of those
    /// above, but to unit 0's until that is left.
    pub fn leaving(mut self, left: Left<'a>) -> Self {
        self.left = Some(left);
        self
    }

    /// Leaves a unit, backward.
    fn leave(&self, unit: usize) -> Result<()> {
        self.left.map_or(Ok(()), |left| left(unit))
    }

    /// Counts the time since the last call as `part`'s.
    fn lap(&mut self, part: times::Part) -> Result<()> {
        match &mut self.times {
            Some(t) => t.lap(part, self.decoder.embedding.table.device()),
            None => Ok(()),
        }
    }

    /// Comes to a unit (0 is the embedding, 1.. are the layers, the last is the head) in a new phase, or in that which
    /// goes on.
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

    /// What to keep of layer `l`.
    fn keep(&self, l: usize, x: &Tensor, saved: layer::Saved) -> Saved {
        match self.lowest {
            Some(lowest) if l + 1 >= lowest => {
                let first = lowest.saturating_sub(1);
                if l - first < self.recompute {
                    Saved::Input(x.clone(), saved.routed().map(|r| Arc::clone(&r.groups)))
                } else {
                    Saved::All(Box::new(saved))
                }
            }
            _ => Saved::Nothing,
        }
    }

    /// One layer, forward.
    fn layer(&mut self, l: usize, x: &Tensor, batch: &Batch) -> Result<(Tensor, layer::Saved)> {
        let (y, saved) = self.decoder.layers[l].forward(x, &batch.context, None, None)?;
        if let Some(routed) = saved.routed() {
            self.routing.note(l, routed, self.router_losses)?;
        }
        Ok((y, saved))
    }

    /// Forward and backward of one micro-batch: the targets' losses; the gradients of
    /// `scale * sum(losses)`, and of the losses on routers, are added to the sink.
    pub fn train(&mut self, batch: &Batch, scale: f64, sink: &Sink<'_>) -> Result<Vec<Tensor>> {
        let decoder = self.decoder;
        let head = decoder.layers.len() + 1;
        let mut kept = Vec::with_capacity(decoder.layers.len());
        self.lap(times::Part::Data)?;
        self.routing = Routing::default();

        self.at(Some(Phase::Forward), 0);
        let mut x = decoder.embedding.forward(&batch.ids)?;
        for l in 0..decoder.layers.len() {
            self.at(Some(Phase::Forward), l + 1);
            let (y, saved) = self.layer(l, &x, batch)?;
            kept.push(self.keep(l, &x, saved));
            x = y;
        }

        self.lap(times::Part::Forward)?;

        self.at(Some(Phase::Backward), head);
        let out = decoder.head.loss(&x, batch, self.head_rows, Some((scale, sink)))?;
        self.lap(times::Part::Head)?;
        drop(x);
        self.leave(head)?;
        let Some(dy) = out.dx else { return Ok(out.losses) };
        let mut dy = Padded::of(&dy)?;
        // known only now: the load-balancing loss couples the routers of all layers
        let balance = self.routing.balance(self.router_losses)?;

        for (l, layer) in decoder.layers.iter().enumerate().rev() {
            let below = l.checked_sub(1).filter(|b| Some(b + 1) >= self.lowest).map(|b| &decoder.layers[b]);
            let rank = below.map_or(0, |b| b.room_back(dy.all(), &batch.context));
            match kept.pop() {
                None | Some(Saved::Nothing) => return Ok(out.losses),
                Some(Saved::All(saved)) => {
                    self.at(Some(Phase::Backward), l + 1);
                    dy = layer.backward(*saved, &dy, &batch.context, sink, balance.as_ref(), rank)?;
                }
                Some(Saved::Input(x, routing)) => {
                    self.at(Some(Phase::Backward), l + 1);
                    let dequantized = dequantized_layer(layer, self.dequantize, routing.as_deref())?;
                    let layer = dequantized.as_ref().unwrap_or(layer);
                    let saved = layer.recompute(x, &batch.context, routing)?;
                    self.lap(times::Part::Recompute)?;
                    dy = layer.backward(saved, &dy, &batch.context, sink, balance.as_ref(), rank)?;
                }
            }
            self.leave(l + 1)?;
            self.lap(times::Part::Backward)?;
        }
        if decoder.embedding.trains() {
            self.at(Some(Phase::Backward), 0);
            decoder.embedding.backward(batch, &dy.values()?, sink)?;
            self.leave(0)?;
            self.lap(times::Part::Backward)?;
        }
        Ok(out.losses)
    }

    /// The hidden states that enter the head [t, d].
    pub fn hidden(&mut self, batch: &Batch) -> Result<Tensor> {
        let decoder = self.decoder;
        self.routing = Routing::default();
        self.at(None, 0);
        let mut x = decoder.embedding.forward(&batch.ids)?;
        for l in 0..decoder.layers.len() {
            self.at(None, l + 1);
            x = self.layer(l, &x, batch)?.0;
        }
        Ok(x)
    }

    /// The targets' losses, forward only.
    pub fn eval(&mut self, batch: &Batch) -> Result<Vec<Tensor>> {
        let head = self.decoder.layers.len() + 1;
        let x = self.hidden(batch)?;
        self.at(None, head);
        let out = self.decoder.head.loss(&x, batch, self.head_rows, None)?;
        Ok(out.losses)
    }

    /// Logits of every token [t, v] in f32.
    pub fn logits(&mut self, batch: &Batch) -> Result<Tensor> {
        let head = self.decoder.layers.len() + 1;
        let x = self.hidden(batch)?;
        self.at(None, head);
        let logits = self.decoder.head.logits(&x, &batch.context)?;
        Ok(logits)
    }
}
