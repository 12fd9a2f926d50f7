//! Weights that ranks split, gathered around the visits of a pass: those of the next visit before this one begins, and
//! released when no visit needs them next. All ranks go through the same visits, with rows or without.

use super::ranks::{self, Next};
use crate::adapt::Params;
use crate::comm::Comm;
use crate::model::Decoder;
use crate::walk::{Around, Outline, Visit};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Gathers what ranks split; nothing where they do not.
pub struct Gather<'a> {
    outline: Outline,
    params: &'a Params,
    comm: &'a dyn Comm,
    /// Units that are here.
    here: RefCell<BTreeSet<usize>>,
}

impl<'a> Gather<'a> {
    /// For passes that all ranks come to.
    pub fn new(decoder: &'a Decoder, params: &'a Params, comm: &'a dyn Comm) -> Self {
        Self { outline: Outline::of(decoder), params, comm, here: RefCell::default() }
    }

    /// Releases all units but those.
    fn keep(&self, needed: &BTreeSet<usize>) -> candle_core::Result<()> {
        let mut here = self.here.borrow_mut();
        while let Some(unit) = here.difference(needed).next().copied() {
            here.remove(&unit);
            self.params.release(unit)?;
        }
        Ok(())
    }
}

impl Around for Gather<'_> {
    fn arrive(&self, visit: Visit, next: Option<Visit>) -> crate::Result<()> {
        if self.params.is_split() {
            for unit in self.outline.needs([visit].into_iter().chain(next)) {
                if self.here.borrow_mut().insert(unit) {
                    self.params.gather(unit, self.comm)?;
                }
            }
        }
        Ok(())
    }

    fn leave(&self, _: Visit, next: Option<Visit>) -> crate::Result<()> {
        Ok(self.keep(&self.outline.needs(next))?)
    }
}

/// A pass that ended early leaves nothing behind.
impl Drop for Gather<'_> {
    fn drop(&mut self) {
        // the error that ended it is the one that is told
        let _ = self.keep(&BTreeSet::new());
    }
}

/// For forward passes of the first rank alone, which the others are told of: they give what it needs.
pub struct Alone<'a>(Gather<'a>);

impl<'a> Alone<'a> {
    /// For passes of the first rank.
    pub fn new(decoder: &'a Decoder, params: &'a Params, comm: &'a dyn Comm) -> Self {
        Self(Gather::new(decoder, params, comm))
    }
}

impl Around for Alone<'_> {
    fn begin(&self) -> crate::Result<()> {
        match self.0.params.is_split() {
            true => ranks::tell_next(self.0.comm, &Next::Forward),
            false => Ok(()),
        }
    }

    fn arrive(&self, visit: Visit, next: Option<Visit>) -> crate::Result<()> {
        self.0.arrive(visit, next)
    }

    fn leave(&self, visit: Visit, next: Option<Visit>) -> crate::Result<()> {
        self.0.leave(visit, next)
    }
}
