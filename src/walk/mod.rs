//! The walk over the layers: two visible loops, and a place for everything that happens around a layer.
//!
//! ```text
//! forward,  layer l:  arrive -> layer.forward(x) -> keep nothing, x and the routing, or all -> leave
//! head:               loss and its gradient, some token rows at a time
//! backward, layer l:  arrive -> decode, recompute if only x was kept -> layer.backward -> leave
//! ```
//!
//! Gathering sharded weights, moving them from the host, reducing gradients: each is an [`Around`], told when
//! the walk arrives at a unit and leaves it. With none of them the walk is plain training on one device.

mod choices;
pub mod generate;
mod routing;
#[cfg(test)]
mod tests;
mod times;

pub use choices::{Choices, Decoded};
pub use routing::{Load, RouterLosses, Routing, dead, entropy, peak};
pub use times::{Part, Times};

use crate::error::{ExitCode, Failure};
use crate::kernel::group::Groups;
use crate::kernel::{Real, Tensor};
use crate::kernel::{optimizer, to_host};
use crate::log::place;
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

/// What the walk does at a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// On the way up.
    Forward,
    /// On the way down.
    Backward,
}

/// Something around a unit: 0 is the embedding, 1.. are the layers, the last is the head.
pub trait Around {
    /// The unit's weights are about to be used.
    fn arrive(&mut self, unit: usize, phase: Phase) -> Result<()>;
    /// They were used; in [`Phase::Backward`] the unit's gradients are whole for this micro-batch.
    fn leave(&mut self, unit: usize, phase: Phase) -> Result<()>;
}

/// What is kept of a layer between forward and backward.
enum Kept {
    /// Nothing: backward does not come here.
    Nothing,
    /// Its input, and how its router decided: the rest is computed again.
    Input(Tensor, Option<Arc<Groups>>),
    /// Everything.
    All(Box<layer::Saved>),
}

/// The layer to visit in place of one that is computed again, where its 4-bit weights are decoded for the visit.
pub fn visited(layer: &Layer, decoded: Decoded, routing: Option<&Groups>) -> Result<Option<Layer>> {
    match decoded {
        Decoded::Visit if layer.is_packed() => layer.decoded(routing).map(Some),
        _ => Ok(None),
    }
}

/// The walk over one model.
pub struct Walk<'a> {
    decoder: &'a Decoder,
    /// Lowest unit that trains; `None` when nothing does.
    lowest: Option<usize>,
    /// Layers, from the lowest that is walked backward, whose activations are computed again.
    recompute: usize,
    /// How 4-bit weights of those layers are decoded.
    decoded: Decoded,
    /// Targets whose logits exist at once.
    head_rows: usize,
    around: Vec<&'a mut dyn Around>,
    times: Option<&'a mut Times>,
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
            decoded: Decoded::default(),
            head_rows: Head::chunk_rows(decoder.head.vocab, !decoder.embedding.table.device().is_cpu()),
            around: Vec::new(),
            times: None,
            router_losses: RouterLosses::default(),
            routing: Routing::default(),
        }
    }

    /// A walk as the plan chose it.
    pub fn chosen(decoder: &'a Decoder, lowest: Option<usize>, c: &Choices) -> Self {
        Self { decoded: c.decoded, head_rows: c.head_rows, ..Self::new(decoder, lowest, c.recompute) }
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

    /// Adds something around the units; it is told after those added before.
    pub fn around(mut self, a: &'a mut dyn Around) -> Self {
        self.around.push(a);
        self
    }

    /// Adds the time that each part of a training walk takes to `times`.
    pub fn timed(mut self, times: &'a mut Times) -> Self {
        self.times = Some(times);
        self
    }

    /// Counts the time since the last call as `part`'s.
    fn lap(&mut self, part: times::Part) -> Result<()> {
        match &mut self.times {
            Some(t) => t.lap(part, self.decoder.embedding.table.device()),
            None => Ok(()),
        }
    }

    /// The part of a step that the time at a unit is of.
    fn part(&self, unit: usize, phase: Phase) -> times::Part {
        match phase {
            Phase::Forward => times::Part::Forward,
            Phase::Backward if unit == self.decoder.layers.len() + 1 => times::Part::Head,
            Phase::Backward => times::Part::Backward,
        }
    }

    fn arrive(&mut self, unit: usize, phase: Phase) -> Result<()> {
        if self.around.is_empty() {
            return Ok(());
        }
        self.lap(self.part(unit, phase))?;
        self.around.iter_mut().try_for_each(|a| a.arrive(unit, phase))?;
        self.lap(times::Part::Gather)
    }

    fn leave(&mut self, unit: usize, phase: Phase) -> Result<()> {
        if self.around.is_empty() {
            return Ok(());
        }
        self.lap(self.part(unit, phase))?;
        self.around.iter_mut().rev().try_for_each(|a| a.leave(unit, phase))?;
        self.lap(if phase == Phase::Forward { times::Part::Gather } else { times::Part::Reduce })
    }

    /// What to keep of layer `l`.
    fn keep(&self, l: usize, x: &Tensor, saved: layer::Saved) -> Kept {
        match self.lowest {
            Some(lowest) if l + 1 >= lowest => {
                let first = lowest.saturating_sub(1);
                if l - first < self.recompute {
                    Kept::Input(x.clone(), saved.routed().map(|r| Arc::clone(&r.groups)))
                } else {
                    Kept::All(Box::new(saved))
                }
            }
            _ => Kept::Nothing,
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

        place::enter(place::Phase::Forward, 0);
        self.arrive(0, Phase::Forward)?;
        let mut x = decoder.embedding.forward(&batch.ids)?;
        self.leave(0, Phase::Forward)?;
        for l in 0..decoder.layers.len() {
            place::enter(place::Phase::Forward, l + 1);
            self.arrive(l + 1, Phase::Forward)?;
            let (y, saved) = self.layer(l, &x, batch)?;
            kept.push(self.keep(l, &x, saved));
            x = y;
            self.leave(l + 1, Phase::Forward)?;
        }

        self.lap(times::Part::Forward)?;

        place::enter(place::Phase::Backward, head);
        self.arrive(head, Phase::Backward)?;
        let out = decoder.head.loss(&x, batch, self.head_rows, Some((scale, sink)))?;
        self.leave(head, Phase::Backward)?;
        self.lap(times::Part::Head)?;
        drop(x);
        let Some(mut dy) = out.dx else { return Ok(out.losses) };
        // known only now: the load-balancing loss couples the routers of all layers
        let balance = self.routing.balance(self.router_losses);

        for (l, layer) in decoder.layers.iter().enumerate().rev() {
            place::enter(place::Phase::Backward, l + 1);
            match kept.pop() {
                None | Some(Kept::Nothing) => return Ok(out.losses),
                Some(Kept::All(saved)) => {
                    self.arrive(l + 1, Phase::Backward)?;
                    dy = layer.backward(*saved, &dy, &batch.context, sink, balance.as_ref())?;
                }
                Some(Kept::Input(x, routing)) => {
                    self.arrive(l + 1, Phase::Backward)?;
                    let visited = visited(layer, self.decoded, routing.as_deref())?;
                    let layer = visited.as_ref().unwrap_or(layer);
                    let saved = layer.again(x, &batch.context, routing)?;
                    self.lap(times::Part::Recompute)?;
                    dy = layer.backward(saved, &dy, &batch.context, sink, balance.as_ref())?;
                }
            }
            self.leave(l + 1, Phase::Backward)?;
            self.lap(times::Part::Backward)?;
        }
        if decoder.embedding.trains() {
            place::enter(place::Phase::Backward, 0);
            self.arrive(0, Phase::Backward)?;
            decoder.embedding.backward(&batch.ids, &dy, sink)?;
            self.leave(0, Phase::Backward)?;
            self.lap(times::Part::Backward)?;
        }
        Ok(out.losses)
    }

    /// The hidden states that enter the head [t, d].
    pub fn hidden(&mut self, batch: &Batch) -> Result<Tensor> {
        let decoder = self.decoder;
        self.routing = Routing::default();
        self.arrive(0, Phase::Forward)?;
        let mut x = decoder.embedding.forward(&batch.ids)?;
        self.leave(0, Phase::Forward)?;
        for l in 0..decoder.layers.len() {
            place::at_unit(l + 1);
            self.arrive(l + 1, Phase::Forward)?;
            x = self.layer(l, &x, batch)?.0;
            self.leave(l + 1, Phase::Forward)?;
        }
        Ok(x)
    }

    /// The targets' losses, forward only.
    pub fn eval(&mut self, batch: &Batch) -> Result<Vec<Tensor>> {
        let head = self.decoder.layers.len() + 1;
        let x = self.hidden(batch)?;
        self.arrive(head, Phase::Forward)?;
        let out = self.decoder.head.loss(&x, batch, self.head_rows, None)?;
        self.leave(head, Phase::Forward)?;
        Ok(out.losses)
    }

    /// Logits of every token [t, v] in f32.
    pub fn logits(&mut self, batch: &Batch) -> Result<Tensor> {
        let head = self.decoder.layers.len() + 1;
        let x = self.hidden(batch)?;
        self.arrive(head, Phase::Forward)?;
        let logits = self.decoder.head.logits(&x, &batch.context)?;
        self.leave(head, Phase::Forward)?;
        Ok(logits)
    }
}
