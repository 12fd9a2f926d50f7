//! Settings of a run with an effect on model states.

use super::optimizer::rounded;
use super::shares::Ranks;
use ft_engine::adapters::{Part, Selection, TrainedPart};
use ft_engine::model::Units;
use ft_engine::model::modules::Module;
use ft_engine::params::buffers::{ALIGN, Shard, is_cut};
use ft_engine::ranks::Axis;
use ft_kernels::Machine;
use ft_recipe::{Offload, Quantize, Recipe};

/// Recipe, selection and machine, with derived settings.
pub(super) struct Setup<'a> {
    pub recipe: &'a Recipe,
    pub selection: &'a Selection,
    pub machine: Machine,
    /// Of the frozen decoder linears.
    pub quantize: Quantize,
    pub ranks: Ranks,
    /// Trained tensors; true without f32 master weights.
    pub trained: Vec<(TrainedPart<'a>, bool)>,
}

impl<'a> Setup<'a> {
    pub fn new(
        recipe: &'a Recipe,
        selection: &'a Selection,
        (machine, quantize): (Machine, Quantize),
        units: Units,
    ) -> Self {
        let (trained, ranks) = (selection.parts(), Ranks::of(recipe, selection, units));
        let rounded = rounded(recipe, selection, machine, &trained);
        let trained = trained.into_iter().zip(rounded).filter(|(t, _)| ranks.has(t.module)).collect();
        Self { recipe, selection, machine, quantize, ranks, trained }
    }

    /// Bytes of a value in the compute dtype.
    pub fn width(&self) -> u64 {
        self.machine.width
    }

    /// Units of the walk.
    pub fn units(&self) -> usize {
        self.selection.layers + 2
    }

    /// Unit of a module.
    pub fn unit(&self, m: &Module) -> usize {
        m.unit(self.selection.layers)
    }

    /// Divisor of a stage's ranks, by kind of buffer: 1 for whole tensors, `tensor` for cut matrices, `expert` for
    /// experts. `stage / divisor` ranks hold copies of a buffer.
    fn kinds(&self) -> impl Iterator<Item = u64> {
        let split = [self.ranks.tensor, self.ranks.expert].into_iter().filter(|n| *n > 1);
        std::iter::once(1).chain(split)
    }

    /// Number of flat buffers of this rank: one a unit and kind.
    pub fn flats(&self) -> usize {
        self.units() * self.kinds().count()
    }

    /// Flat buffer of a part of a module.
    pub fn flat(&self, m: &Module, part: Part) -> usize {
        let kind = match m.expert {
            Some(_) if self.ranks.expert > 1 => self.kinds().count() - 1,
            _ => usize::from(self.ranks.tensor > 1 && is_cut(m, part)),
        };
        self.unit(m) + kind * self.units()
    }

    /// Flat buffers of a unit.
    pub fn flats_of(&self, unit: usize) -> impl Iterator<Item = usize> {
        (unit..self.flats()).step_by(self.units())
    }

    /// Sums of `of` over the flat buffers, by unit.
    pub fn by_unit(&self, of: impl Fn(usize) -> u64) -> Vec<u64> {
        (0..self.units()).map(|u| self.flats_of(u).map(&of).sum()).collect()
    }

    /// Whether the first and the last stage share a flat buffer.
    pub fn is_ends(&self, flat: usize) -> bool {
        self.ranks.ends.is_some() && flat == 0
    }

    /// This rank's share of the trained `bytes` of a flat buffer: see [`Ranks::share`]. A buffer of the first and the
    /// last stage has states in parts only.
    pub fn share(&self, flat: usize, bytes: u64, stage: u8) -> u64 {
        match self.ranks.ends.filter(|_| self.is_ends(flat)) {
            Some(ends) if stage == 1 && self.ranks.zero >= 1 => bytes.div_ceil(ends),
            Some(_) => bytes,
            None => self.ranks.share(self.copies(flat), bytes, stage),
        }
    }

    /// Ranks with copies of a flat buffer, as a kind of group.
    pub fn axis(&self, flat: usize) -> Axis {
        match flat / self.units() {
            0 if self.is_ends(flat) => Axis::Ends,
            0 => Axis::Stage,
            1 if self.ranks.tensor > 1 => Axis::Replica,
            _ => Axis::ExpertReplica,
        }
    }

    /// Number of ranks with copies of a flat buffer.
    pub fn copies(&self, flat: usize) -> u64 {
        if self.is_ends(flat) {
            return self.ranks.ends.unwrap_or(1);
        }
        self.ranks.stage / self.kinds().nth(flat / self.units()).unwrap_or(1)
    }

    pub fn offloads(&self, what: Offload) -> bool {
        self.recipe.memory.offloads(what)
    }

    /// Whether optimizer states are in host memory apart from the device's.
    pub fn states_on_host(&self) -> bool {
        self.offloads(Offload::Optimizer) && self.machine.cuda
    }

    /// Whether weights are in host memory apart from the device's.
    pub fn weights_on_host(&self) -> bool {
        self.offloads(Offload::Params) && self.machine.cuda
    }

    /// Whether the weights double as master weights.
    pub fn one_copy(&self) -> bool {
        self.machine.computes_in_f32() && self.offloads(Offload::Optimizer) == self.offloads(Offload::Params)
    }

    /// Whether compute weights are sharded (ZeRO stage 3).
    pub fn is_split(&self) -> bool {
        self.ranks.zero >= 3 && self.ranks.stage > 1
    }

    /// Whether compute weights are gathered for a visit: sharded or offloaded.
    pub fn is_gathered(&self) -> bool {
        self.recipe.weights_come_and_go()
    }

    /// Whether a flat buffer is gathered for a visit. Experts of one owner are not.
    pub fn comes(&self, flat: usize) -> bool {
        self.is_gathered() && (self.offloads(Offload::Params) || self.copies(flat) > 1)
    }

    /// Length of a frozen tensor in its buffer: gathered ones start at aligned offsets.
    pub fn placed(&self, flat: usize, values: u64) -> u64 {
        if self.comes(flat) { values.next_multiple_of(ALIGN as u64) } else { values }
    }

    /// Values of the first rank in a flat buffer of `values`.
    pub fn own(&self, flat: usize, values: u64) -> u64 {
        let shard = Shard { rank: 0, ranks: self.copies(flat) as usize, stage: self.ranks.zero };
        shard.part(values as usize).len() as u64
    }

    /// Bytes received from the other ranks for a buffer of `values` values of `size` bytes.
    pub fn received(&self, flat: usize, values: u64, size: u64) -> u64 {
        size * (values - self.own(flat, values))
    }
}
