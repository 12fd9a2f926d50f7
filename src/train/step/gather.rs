//! Gathers weights sharded over ranks or offloaded to the host. Weights of the next visit are gathered before the
//! current visit begins, to overlap transfers with computation, and are released unless the next visit needs them. All
//! ranks make the same visits, with or without rows of their own.

use super::command::{self, Command};
use ft_engine::model::Decoder;
use ft_engine::params::Params;
use ft_engine::ranks::{Comm, Group};
use ft_engine::walk::{Hooks, Outline, Reading, Stage, Visit};
use ft_kernels::crossing::PendingTransfer;
use std::cell::RefCell;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// Gathers weights around visits. Does nothing if all weights stay on the device.
pub struct Gather<'a> {
    /// Whether the first rank alone makes the passes, and announces them.
    leads: bool,
    outline: Outline,
    params: &'a Params,
    comm: &'a dyn Comm,
    /// Ranks that split the experts, if they do.
    experts: Option<Group<'a>>,
    /// Neighbors of this rank's stage, if ranks split the layers.
    stage: Option<Stage<'a>>,
    /// Units on the device, with their pending transfers.
    here: RefCell<BTreeMap<usize, Vec<PendingTransfer>>>,
}

impl<'a> Gather<'a> {
    /// Creates a gatherer for passes of all ranks.
    pub fn new(decoder: &'a Decoder, params: &'a Params, comm: &'a dyn Comm) -> Self {
        let experts = params.split.experts_group(comm);
        let stage = Stage::of(decoder, (&params.split, params.lowest_unit()), comm);
        let outline = Outline::of(decoder);
        Self { leads: false, outline, params, comm, experts, stage, here: RefCell::default() }
    }

    /// Creates a gatherer for forward passes of the first rank alone, of a model with undivided matrices and experts.
    /// Announces every pass to the other ranks, so they can send their shards, and the tokens of documents to other
    /// stages, so they can follow.
    pub fn leading(decoder: &'a Decoder, params: &'a Params, comm: &'a dyn Comm) -> Self {
        let mut gather = Self::new(decoder, params, comm);
        gather.leads = true;
        gather
    }

    /// Releases all units except `needed`.
    fn keep(&self, needed: &BTreeSet<usize>) -> candle_core::Result<()> {
        let mut here = self.here.borrow_mut();
        let gone: Vec<usize> = here.keys().filter(|u| !needed.contains(u)).copied().collect();
        let release = |unit| {
            // Dropping pending transfers waits for them.
            drop(here.remove(&unit));
            self.params.release(unit)
        };
        // All of them, as in [`Params::release`].
        gone.into_iter().map(release).fold(Ok(()), Result::and)
    }
}

impl Hooks for Gather<'_> {
    fn begin(&self) -> ft_base::Result<()> {
        let forward = self.leads && self.params.needs_others() && self.stage.is_none();
        if forward { command::announce(self.comm, &Command::Forward) } else { Ok(()) }
    }

    fn experts(&self) -> Option<&dyn Comm> {
        self.experts.as_ref().map(|group| group as &dyn Comm)
    }

    fn stage(&self) -> Option<&Stage<'_>> {
        self.stage.as_ref()
    }

    fn read(&self, reading: &Reading) -> ft_base::Result<()> {
        let reads = self.leads && self.stage.is_some();
        if reads { command::announce(self.comm, &Command::Read(reading.clone())) } else { Ok(()) }
    }

    fn pre_visit(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
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
            here.get_mut(&unit).into_iter().flat_map(|a| a.drain(..)).try_for_each(PendingTransfer::wait)?;
        }
        Ok(())
    }

    fn post_visit(&self, _: Visit, next: Option<Visit>) -> ft_base::Result<()> {
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
