//! Gathers weights that are sharded over ranks or offloaded to the host. Weights of the next visit are
//! gathered before the current visit begins, so that transfers overlap with computation, and are released
//! when the next visit does not need them. All ranks make the same visits, with or without rows of their
//! own.

use super::command::{self, Command};
use ft_engine::model::Decoder;
use ft_engine::params::Params;
use ft_engine::ranks::{Comm, Group};
use ft_engine::walk::{Hooks, Outline, Reading, Stage, Visit};
use ft_kernels::crossing::Arrival;
use std::cell::RefCell;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// Gathers weights around visits. Does nothing if all weights stay on the device.
pub struct Gather<'a> {
    outline: Outline,
    params: &'a Params,
    comm: &'a dyn Comm,
    /// Ranks that split the experts, if they do.
    experts: Option<Group<'a>>,
    /// Neighbours of this rank's stage, if ranks split the layers.
    stage: Option<Stage<'a>>,
    /// Units on the device, with their pending transfers.
    here: RefCell<BTreeMap<usize, Vec<Arrival>>>,
}

impl<'a> Gather<'a> {
    /// Creates a gatherer for passes in which all ranks take part.
    pub fn new(decoder: &'a Decoder, params: &'a Params, comm: &'a dyn Comm) -> Self {
        let experts = params.split.experts_group(comm);
        let stage = Stage::of(decoder, (&params.split, params.lowest_unit()), comm);
        Self { outline: Outline::of(decoder), params, comm, experts, stage, here: RefCell::default() }
    }

    /// Releases all units except `needed`.
    fn keep(&self, needed: &BTreeSet<usize>) -> candle_core::Result<()> {
        let mut here = self.here.borrow_mut();
        let gone: Vec<usize> = here.keys().filter(|u| !needed.contains(u)).copied().collect();
        for unit in gone {
            // Dropping pending transfers waits for them.
            drop(here.remove(&unit));
            self.params.release(unit)?;
        }
        Ok(())
    }
}

impl Hooks for Gather<'_> {
    fn experts(&self) -> Option<&dyn Comm> {
        self.experts.as_ref().map(|group| group as &dyn Comm)
    }

    fn stage(&self) -> Option<&Stage<'_>> {
        self.stage.as_ref()
    }

    fn arrive(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        if !self.params.is_gathered() {
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

/// Releases the units after an early end of a pass.
impl Drop for Gather<'_> {
    fn drop(&mut self) {
        // The caller already returns the first error.
        let _ = self.keep(&BTreeSet::new());
    }
}

/// As [`Gather`], for forward passes of the first rank alone, of a model whose matrices and experts no axis divides.
/// Announces every pass to the other ranks, so they can send their shards, and the tokens of documents to other stages,
/// so they can follow.
pub struct LeaderGather<'a>(Gather<'a>);

impl<'a> LeaderGather<'a> {
    /// Creates a gatherer for passes of the first rank.
    pub fn new(decoder: &'a Decoder, params: &'a Params, comm: &'a dyn Comm) -> Self {
        Self(Gather::new(decoder, params, comm))
    }
}

impl Hooks for LeaderGather<'_> {
    fn begin(&self) -> ft_base::Result<()> {
        let Gather { params, comm, stage, .. } = &self.0;
        let forward = params.needs_others() && stage.is_none();
        if forward { command::announce(*comm, &Command::Forward) } else { Ok(()) }
    }

    fn stage(&self) -> Option<&Stage<'_>> {
        self.0.stage()
    }

    fn read(&self, reading: &Reading) -> ft_base::Result<()> {
        let announce = || command::announce(self.0.comm, &Command::Read(reading.clone()));
        self.0.stage.as_ref().map_or(Ok(()), |_| announce())
    }

    fn arrive(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.0.arrive(visit, next)
    }

    fn leave(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.0.leave(visit, next)
    }
}
