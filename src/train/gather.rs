//! Weights that ranks split, or that live on the host, gathered around the visits of a pass: those of the next visit before
//! this one begins, and released when no visit needs them next. All ranks go through the same visits, with rows or
//! without. What comes from the host does so while this visit goes on.

use super::ranks::{self, Next};
use ft_engine::adapt::Params;
use ft_engine::comm::Comm;
use ft_kernels::crossing::Arrival;
use ft_engine::model::Decoder;
use ft_engine::walk::{Around, Outline, Visit};
use std::cell::RefCell;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// Gathers what comes and goes; nothing where all of it is on the device.
pub struct Gather<'a> {
    outline: Outline,
    params: &'a Params,
    comm: &'a dyn Comm,
    /// Units that are here, each with what of it is on its way.
    here: RefCell<BTreeMap<usize, Vec<Arrival>>>,
}

impl<'a> Gather<'a> {
    /// For passes that all ranks come to.
    pub fn new(decoder: &'a Decoder, params: &'a Params, comm: &'a dyn Comm) -> Self {
        Self { outline: Outline::of(decoder), params, comm, here: RefCell::default() }
    }

    /// Releases all units but those.
    fn keep(&self, needed: &BTreeSet<usize>) -> candle_core::Result<()> {
        let mut here = self.here.borrow_mut();
        let gone: Vec<usize> = here.keys().filter(|u| !needed.contains(u)).copied().collect();
        for unit in gone {
            // what is still on its way is waited for
            drop(here.remove(&unit));
            self.params.release(unit)?;
        }
        Ok(())
    }
}

impl Around for Gather<'_> {
    fn arrive(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        if !self.params.comes_and_goes() {
            return Ok(());
        }
        let mut here = self.here.borrow_mut();
        for unit in self.outline.needs([visit].into_iter().chain(next)) {
            if let Entry::Vacant(new) = here.entry(unit) {
                new.insert(Vec::new()).extend(self.params.gather(unit, self.comm)?);
            }
        }
        for unit in self.outline.needs([visit]) {
            here.get_mut(&unit).into_iter().flat_map(|a| a.drain(..)).try_for_each(Arrival::wait)?;
        }
        Ok(())
    }

    fn leave(&self, _: Visit, next: Option<Visit>) -> ft_base::Result<()> {
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
    fn begin(&self) -> ft_base::Result<()> {
        match self.0.params.is_split() {
            true => ranks::tell_next(self.0.comm, &Next::Forward),
            false => Ok(()),
        }
    }

    fn arrive(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.0.arrive(visit, next)
    }

    fn leave(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.0.leave(visit, next)
    }
}
