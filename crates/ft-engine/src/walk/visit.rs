//! The visits of a pass over the units, and hooks around visits.

use super::stage::Stage;
use crate::model::{Decoder, Units};
use crate::ranks::Comm;
use ft_base::memory::place::Phase;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A visit to a unit: 0 is the embedding, then the layers, then the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    /// Phase that starts with this visit; `None` continues the current phase.
    pub phase: Option<Phase>,
    /// Index of the unit.
    pub unit: usize,
}

impl Visit {
    /// Whether the visit belongs to the backward pass.
    pub fn is_backward(self) -> bool {
        self.phase == Some(Phase::Backward)
    }
}

/// Properties of a model: determine the visits of a pass and the weights used in a visit.
#[derive(Clone, Copy, Debug)]
pub struct Outline {
    /// Number of layers.
    pub layers: usize,
    /// Units to visit.
    pub units: Units,
    /// The head shares the table of the embedding.
    pub tied: bool,
    /// The embedding trains.
    pub embedding: bool,
    /// The backward pass of the embedding uses weights.
    pub uses_weights: bool,
}

impl Outline {
    /// Reads the outline of a model.
    pub fn of(d: &Decoder) -> Self {
        let (embedding, uses_weights) = (d.embedding.trains(), d.embedding.uses_weights());
        let (layers, units) = (d.layers.len(), d.units);
        Self { layers, units, tied: d.config.tied, embedding, uses_weights }
    }

    /// Visits of a training pass down to unit `lowest`. Forward and backward pass of the head are computed in
    /// one.
    pub fn training(self, lowest: Option<usize>) -> Vec<Visit> {
        let head = self.layers + 1;
        let up = (0..head).map(|unit| Visit { phase: Some(Phase::Forward), unit });
        let first = lowest.map_or(head, |u| u.max(1));
        let down = std::iter::once(head).chain((first..head).rev()).chain(self.embedding.then_some(0));
        let down = down.map(|unit| Visit { phase: Some(Phase::Backward), unit });
        up.chain(down).filter(|v| self.units.has(v.unit)).collect()
    }

    /// Visits of a forward pass.
    pub fn forward(self) -> Vec<Visit> {
        (self.units.first..self.units.end).map(|unit| Visit { phase: None, unit }).collect()
    }

    /// Units with weights used in the visits.
    pub fn needs(self, visits: impl IntoIterator<Item = Visit>) -> BTreeSet<usize> {
        let mut units = BTreeSet::new();
        for v in visits {
            // the gradient of a plain embedding table does not depend on the table
            if !(v.is_backward() && v.unit == 0) || self.uses_weights {
                units.insert(v.unit);
            }
            if self.tied && v.unit == self.layers + 1 {
                units.insert(0);
            }
        }
        units
    }
}

/// Next tokens of a document for a reader with a key-value cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// Number of tokens before them; a document begins anew at 0.
    pub past: usize,
    /// The tokens.
    pub ids: Vec<u32>,
    /// Number of tokens of the document, with known later ones.
    pub total: usize,
    /// Largest possible length of the document, in tokens.
    pub limit: usize,
    /// Whether logits follow the last token.
    pub logits: bool,
}

/// Hooks called around the visits of a pass.
pub trait Hooks {
    /// Called at the start of a pass.
    ///
    /// # Errors
    /// A lost rank.
    fn begin(&self) -> ft_base::Result<()> {
        Ok(())
    }

    /// Expert-parallel ranks, if any. Layers exchange rows with them.
    fn experts(&self) -> Option<&dyn Comm> {
        None
    }

    /// The stage of this rank, if ranks split the layers. Forward passes exchange hidden states with its neighbors.
    fn stage(&self) -> Option<&Stage<'_>> {
        None
    }

    /// Called before the tokens of a document are read; [`Hooks::begin`] follows.
    ///
    /// # Errors
    /// A lost rank.
    fn read(&self, _: &Reading) -> ft_base::Result<()> {
        Ok(())
    }

    /// Called before a visit, with the visit after it.
    ///
    /// # Errors
    /// A lost rank; errors of the device.
    fn pre_visit(&self, _: Visit, _: Option<Visit>) -> ft_base::Result<()> {
        Ok(())
    }

    /// Called after a visit. In the backward pass the gradients of this unit and of all units above are then
    /// complete, except for unit 0, complete after its own visit.
    ///
    /// # Errors
    /// See [`Hooks::pre_visit`].
    fn post_visit(&self, _: Visit, _: Option<Visit>) -> ft_base::Result<()> {
        Ok(())
    }
}

/// Hooks that do nothing.
#[derive(Clone, Copy, Debug)]
pub struct NoHooks;

impl Hooks for NoHooks {}

/// An iteration over the visits of a pass.
pub struct Visits<'a> {
    visits: Vec<Visit>,
    /// Index of the next or current visit.
    at: usize,
    /// Number of visits before a pause for other passes.
    pause: usize,
    hooks: &'a dyn Hooks,
}

impl<'a> Visits<'a> {
    /// Starts a pass.
    ///
    /// # Errors
    /// See [`Hooks::begin`].
    pub fn begin(visits: Vec<Visit>, hooks: &'a dyn Hooks) -> ft_base::Result<Self> {
        hooks.begin()?;
        Ok(Self { visits, at: 0, pause: usize::MAX, hooks })
    }

    /// Starts the next visit; `None` after the last one.
    ///
    /// # Errors
    /// See [`Hooks::pre_visit`].
    pub fn start_visit(&self) -> ft_base::Result<Option<Visit>> {
        let visit = self.visits.get(self.at).copied();
        visit.map_or(Ok(()), |v| self.hooks.pre_visit(v, self.next(self.at + 1)))?;
        Ok(visit)
    }

    /// The visit `at`, if no pause precedes it.
    fn next(&self, at: usize) -> Option<Visit> {
        self.visits.get(at).copied().filter(|_| at != self.pause)
    }

    /// Splits the pass in two for a pipeline: between the forward and the backward visits, other micro-batches run. The
    /// last forward visit announces no next visit.
    pub fn pausing(self) -> Self {
        Self { pause: self.visits.iter().filter(|v| !v.is_backward()).count(), ..self }
    }

    /// Index at which the current half ends: the pause during the forward visits; unbounded afterwards or without a
    /// pause.
    pub fn until(&self) -> usize {
        if self.at < self.pause { self.pause } else { usize::MAX }
    }

    /// Number of visits made.
    pub fn made(&self) -> usize {
        self.at
    }

    /// Ends the current visit.
    ///
    /// # Errors
    /// See [`Hooks::post_visit`].
    pub fn end_visit(&mut self) -> ft_base::Result<()> {
        let visit = self.visits.get(self.at).copied();
        self.at += 1;
        visit.map_or(Ok(()), |v| self.hooks.post_visit(v, self.next(self.at)))
    }
}

/// Runs a pass calling only `f` at every unit, for instance on a rank without rows.
///
/// # Errors
/// See [`Hooks::pre_visit`]; errors of `f`.
pub fn pass(
    visits: Vec<Visit>,
    hooks: &dyn Hooks,
    f: &mut dyn FnMut(usize) -> ft_base::Result<()>,
) -> ft_base::Result<()> {
    let mut pass = Visits::begin(visits, hooks)?;
    while let Some(visit) = pass.start_visit()? {
        f(visit.unit)?;
        pass.end_visit()?;
    }
    Ok(())
}
