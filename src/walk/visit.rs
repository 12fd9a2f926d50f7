//! The visits of a pass over the model, and what goes on around them.

use crate::log::place::Phase;
use crate::model::Decoder;
use std::collections::BTreeSet;

/// A visit to a unit: 0 is the embedding, 1.. are the layers, the last is the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    /// The phase that it is of; none where that goes on.
    pub phase: Option<Phase>,
    /// The unit.
    pub unit: usize,
}

impl Visit {
    /// Whether it is one of the way down.
    pub fn is_backward(self) -> bool {
        self.phase == Some(Phase::Backward)
    }
}

/// What decides the visits of a pass, and what each needs.
#[derive(Clone, Copy, Debug)]
pub struct Outline {
    /// Layers.
    pub layers: usize,
    /// Whether the head has the embedding's table.
    pub tied: bool,
    /// Whether the embedding trains.
    pub embedding: bool,
    /// Whether it has a low-rank update.
    pub lora: bool,
}

impl Outline {
    /// Of a model.
    pub fn of(d: &Decoder) -> Self {
        let lora = d.embedding.lora.is_some();
        Self { layers: d.layers.len(), tied: d.config.tied, embedding: d.embedding.trains(), lora }
    }

    /// The visits of a training pass that goes down to unit `lowest`. The head's loss and its gradient are one visit.
    pub fn training(self, lowest: Option<usize>) -> Vec<Visit> {
        let head = self.layers + 1;
        let up = (0..head).map(|unit| Visit { phase: Some(Phase::Forward), unit });
        let first = lowest.map_or(head, |u| u.max(1));
        let down = std::iter::once(head).chain((first..head).rev()).chain(self.embedding.then_some(0));
        up.chain(down.map(|unit| Visit { phase: Some(Phase::Backward), unit })).collect()
    }

    /// The visits of a forward pass.
    pub fn forward(self) -> Vec<Visit> {
        (0..=self.layers + 1).map(|unit| Visit { phase: None, unit }).collect()
    }

    /// The units whose weights visits compute with.
    pub fn needs(self, visits: impl IntoIterator<Item = Visit>) -> BTreeSet<usize> {
        let mut units = BTreeSet::new();
        for v in visits {
            // the gradient of a table needs none of its values
            if !(v.is_backward() && v.unit == 0) || self.lora {
                units.insert(v.unit);
            }
            if self.tied && v.unit == self.layers + 1 {
                units.insert(0);
            }
        }
        units
    }
}

/// What goes on around the visits of a pass.
pub trait Around {
    /// A pass begins.
    ///
    /// # Errors
    /// A lost rank.
    fn begin(&self) -> crate::Result<()> {
        Ok(())
    }

    /// Before a visit, after which `next` comes.
    ///
    /// # Errors
    /// A lost rank; of the device.
    fn arrive(&self, visit: Visit, next: Option<Visit>) -> crate::Result<()>;

    /// After a visit. Backward, nothing more is added to the gradients of its unit and of those above, but to unit 0's
    /// until that is left.
    ///
    /// # Errors
    /// As [`Around::arrive`].
    fn leave(&self, visit: Visit, next: Option<Visit>) -> crate::Result<()>;
}

/// Nothing.
#[derive(Clone, Copy, Debug)]
pub struct Nothing;

impl Around for Nothing {
    fn arrive(&self, _: Visit, _: Option<Visit>) -> crate::Result<()> {
        Ok(())
    }

    fn leave(&self, _: Visit, _: Option<Visit>) -> crate::Result<()> {
        Ok(())
    }
}

/// A pass, visit by visit.
pub struct Pass<'a> {
    visits: Vec<Visit>,
    /// Of the visit that comes, or that goes on.
    at: usize,
    around: &'a dyn Around,
}

impl<'a> Pass<'a> {
    /// Begins a pass.
    ///
    /// # Errors
    /// As [`Around::begin`].
    pub fn begin(visits: Vec<Visit>, around: &'a dyn Around) -> crate::Result<Self> {
        around.begin()?;
        Ok(Self { visits, at: 0, around })
    }

    /// Comes to the next visit.
    ///
    /// # Errors
    /// As [`Around::arrive`].
    pub fn arrive(&self) -> crate::Result<Option<Visit>> {
        let visit = self.visits.get(self.at).copied();
        visit.map_or(Ok(()), |v| self.around.arrive(v, self.visits.get(self.at + 1).copied()))?;
        Ok(visit)
    }

    /// Leaves it.
    ///
    /// # Errors
    /// As [`Around::leave`].
    pub fn leave(&mut self) -> crate::Result<()> {
        let visit = self.visits.get(self.at).copied();
        self.at += 1;
        visit.map_or(Ok(()), |v| self.around.leave(v, self.visits.get(self.at).copied()))
    }
}

/// Goes through a pass that computes nothing but what `f` does at each unit: that of a rank without rows, say.
///
/// # Errors
/// As [`Around::arrive`]; those of `f`.
pub fn pass(
    visits: Vec<Visit>,
    around: &dyn Around,
    f: &mut dyn FnMut(usize) -> crate::Result<()>,
) -> crate::Result<()> {
    let mut pass = Pass::begin(visits, around)?;
    while let Some(visit) = pass.arrive()? {
        f(visit.unit)?;
        pass.leave()?;
    }
    Ok(())
}
