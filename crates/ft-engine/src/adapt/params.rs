//! The trained tensors in flat buffers: one set a unit of the walk.
//!
//! A unit (embedding, each layer, head) holds all its trained tensors end to end, so that reduce, norm, clip
//! and optimizer are one pass a unit. The layers get views into the `compute` buffer: a step changes them in
//! place and nothing is copied around, but where master weights and moments live on the host (`memory.offload`).
//! Of what ranks split, each holds a range of every unit's buffer, and of weights that live on the host the device holds
//! none: what the layers compute with is then gathered for a visit to the unit, and released after it.

use super::buffer::{Buffer, Held, Shard, common};
use super::layout::{layout, wide_units};
use super::moments::{Moments, is_large};
use super::projected::{Projected, Projection};
use super::selection::Trained;
use crate::base::Initials;
use crate::comm::{At, Comm};
use ft_kernels::Tensor;
use ft_kernels::cpu::is_native;
use ft_kernels::crossing::Arrival;
use ft_kernels::optimizer::Draws;
use ft_kernels::tensor::Real;
use ft_kernels::vacant::{vacant, vacate};
use crate::model::sink::Slot;
use candle_core::{DType, Device, Result};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The buffers of one unit.
#[derive(Debug)]
pub struct Unit {
    /// Elements, gaps between tensors included.
    pub len: usize,
    /// The part that is this rank's where something is split: each rank has another.
    pub part: Range<usize>,
    /// What the layers compute with, in the compute dtype.
    pub compute: Buffer,
    /// f32 master weights of the elements that keep some; what is held of the compute buffer where that is f32 and lives in
    /// the same place.
    pub master: Held,
    /// The elements that keep master weights. Of the others the compute buffer is all there is: see [`Unit::draws`].
    pub kept: Range<usize>,
    /// Its number in the walk, and the seed by which values are rounded that keep no master weights.
    number: usize,
    seed: u64,
    /// The master weights once more, where layers compute with them too and they come and go.
    pub wide: Option<Buffer>,
    /// Whether every rank has all master weights of this unit, whatever its part is.
    pub replicated: bool,
    /// Gradients, f32; none when nothing is trained (an adapter that is only used), or each unit is updated in its
    /// backward visit.
    pub grads: Option<Held>,
    /// AdamW's moments, but for those of what is projected.
    pub moments: Option<Moments>,
    /// GaLore's states, of matrices whose gradients are projected.
    pub projected: Vec<Projected>,
}

/// All trained tensors of a model.
#[derive(Debug)]
pub struct Params {
    /// What trains, in the order of the forward pass.
    pub tensors: Vec<Trained>,
    /// Where each stands.
    pub slots: Vec<Slot>,
    /// Buffers by unit; `None` where nothing trains.
    pub units: Vec<Option<Unit>>,
    /// Frozen weights by unit, where they come and go; else they are tensors by themselves.
    pub frozen: Vec<Vec<Buffer>>,
    /// Whether master weights and moments live on the host.
    pub offloaded: bool,
    /// Whether what the layers compute with lives on the host, and comes for each visit.
    pub weights_offloaded: bool,
    /// Whether buffers of what crosses between the host and the device are page-locked.
    pub pin: bool,
    /// Whether moments of large tensors are in 8 bits.
    pub eight_bit: bool,
    /// How gradients are projected.
    pub projection: Projection,
    /// Whether each unit is updated in its backward visit.
    pub in_backward: bool,
    /// What of it this rank holds.
    pub shard: Shard,
    /// What low-rank updates began with, where the base gave it.
    pub initials: Option<Arc<Initials>>,
    /// Whether all gradients are zero since an update that left them so.
    pub zeroed: AtomicBool,
}

/// What is allocated beside the values that the layers compute with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocate {
    /// Gradients and moments.
    pub train: bool,
    /// No gradients that stay: each unit's live in its backward visit (`optimizer.in_backward`).
    pub in_backward: bool,
    /// Master weights and moments on the host (`memory.offload = ["optimizer"]`).
    pub offload: bool,
    /// What layers compute with on the host, frozen weights too (`memory.offload = ["params"]`).
    pub offload_weights: bool,
    /// Host memory that values cross from or to page-locked (`memory.pin`).
    pub pin: bool,
    /// Moments of large tensors in 8 bits (`optimizer.name = "adamw8bit"`).
    pub eight_bit: bool,
    /// No f32 master weights of what trains in full, where layers compute in 16 bits: its new values are rounded by the
    /// random numbers of this seed (`optimizer.master = "none"`).
    pub rounding: Option<u64>,
    /// Directions that gradients are projected onto (`optimizer.name = "galore"`); 0 for none.
    pub project: usize,
    /// What of them is this rank's.
    pub shard: Shard,
}

impl Unit {
    /// The buffers of which a rank updates its part, and needs all.
    pub fn shared(&self) -> impl Iterator<Item = &Tensor> {
        let apart = self.replicated && !self.is_master();
        std::iter::once(&self.compute.held.values).chain(apart.then_some(&self.master.values))
    }

    /// Whether elements have master weights; what trains in full in 16 bits may have none.
    pub fn keeps(&self, range: &Range<usize>) -> bool {
        self.kept.start <= range.start && range.end <= self.kept.end
    }

    /// The parts of a range, each of which has master weights or has none.
    pub fn by_kept(&self, range: &Range<usize>) -> [Range<usize>; 3] {
        let ends = [0..self.kept.start, self.kept.clone(), self.kept.end..self.len];
        ends.map(|part| common(&part, range))
    }

    /// The random numbers by which update `t` (from 1) rounds elements from `start` on that have no master weights.
    pub fn draws(&self, t: u64, start: usize) -> Draws {
        Draws::new(self.seed, t, self.number, start)
    }

    /// The values of elements that have master weights, or have none: in f32, or as the layers compute with them.
    ///
    /// # Errors
    /// A range that is not all here.
    pub fn values(&self, range: Range<usize>) -> Result<Tensor> {
        if self.keeps(&range) { self.master.of(range) } else { self.compute.held.of(range) }
    }

    /// Gives what the layers compute with new values of the master weights, where it lives.
    ///
    /// # Errors
    /// A range that is not all here; of the device.
    pub fn refresh(&self, range: Range<usize>) -> Result<()> {
        if self.is_master() || !self.keeps(&range) {
            return Ok(());
        }
        let (values, to) = (self.master.of(range.clone())?, self.compute.held.of(range)?);
        let values = match self.compute.whole.dtype() {
            // a tensor of its own: the master weights are another
            DType::F32 => values.force_contiguous()?,
            dtype => values.to_dtype(dtype)?,
        };
        to.slice_set(&values.real()?.to_device(to.real()?.device())?.into(), 0, 0)
    }

    /// Whether what is held of the compute buffer is the master weights.
    pub fn is_master(&self) -> bool {
        self.master.is(&self.compute.held.values)
    }
}

impl Params {
    /// Zero-filled buffers for these tensors.
    pub fn new(
        tensors: Vec<Trained>,
        units: usize,
        dtype: DType,
        device: &Device,
        what: Allocate,
    ) -> Result<Self> {
        let projection = Projection { rank: what.project, eight_bit: what.eight_bit };
        let (slots, ends) = layout(&tensors, units, projection);
        let wide = wide_units(tensors.iter().map(|t| (t.unit, t.part)));
        let Allocate { train, in_backward, offload, offload_weights, pin, eight_bit, shard, .. } = what;
        let count = units;
        let home = if offload { &Device::Cpu } else { device };
        let frozen = vec![Vec::new(); units];
        let units = (0..units)
            .map(|number| {
                let len = ends.all[number];
                if len == 0 {
                    return Ok(None);
                }
                let (split, apart) = (shard.is_split(), shard.is_split() || offload_weights);
                let compute = match apart {
                    true => Buffer::apart(vacant(len, dtype, device)?, what)?,
                    false => Buffer::replicated(len, dtype, device)?,
                };
                let (part, states) = (shard.part(len), shard.held(len, 1));
                let same = dtype == DType::F32 && offload == offload_weights;
                let wide = wide.contains(&number);
                let replicated = !split && (same || shard.stage == 0 || wide);
                // where layers compute with some master weights, all of the unit's are kept
                let kept = match what.rounding.is_none() || dtype == DType::F32 || wide {
                    true => 0..len,
                    false => ends.large_full[number]..ends.adapters[number],
                };
                let master = match (same, replicated) {
                    (true, _) => compute.held.clone(),
                    (_, true) => Held::zeros(kept.clone(), home)?,
                    _ => Held::zeros(common(&states, &kept), home)?,
                };
                // in f32 what the layers compute with has the same values
                let wide = match apart
                    && wide
                    && dtype != DType::F32
                    && (offload_weights || home.same_device(device))
                {
                    true => Some(Buffer::of(master.clone(), vacant(len, DType::F32, device)?, what)?),
                    false => None,
                };
                let grads = || Held::zeros(shard.held(len, 2), device);
                let large = if eight_bit { ends.large[number] } else { 0 };
                let own = common(&states, &(0..ends.plain[number]));
                let moments = || Moments::new(&own, large, home);
                let mut projected = Vec::new();
                for slot in slots.iter().filter(|s| s.unit == number && train) {
                    if projection.takes_tensor(&tensors[slot.index], count) {
                        projected.push(Projected::new(slot.index, (slot.rows, slot.cols), projection, home)?);
                    }
                }
                Ok(Some(Unit {
                    len,
                    part,
                    replicated,
                    master,
                    kept,
                    number,
                    seed: what.rounding.unwrap_or(0),
                    wide,
                    compute,
                    grads: (train && !in_backward).then(grads).transpose()?,
                    moments: train.then(moments).transpose()?,
                    projected,
                }))
            })
            .collect::<Result<_>>()?;
        let zeroed = AtomicBool::new(false);
        let (offloaded, weights_offloaded, initials) = (offload, offload_weights, None);
        Ok(Self {
            tensors,
            slots,
            units,
            frozen,
            offloaded,
            weights_offloaded,
            pin,
            eight_bit,
            projection,
            in_backward,
            shard,
            initials,
            zeroed,
        })
    }

    /// The buffers that hold a slot.
    ///
    /// # Errors
    /// Nothing of its unit trains.
    pub fn unit(&self, slot: &Slot) -> Result<&Unit> {
        match self.units.get(slot.unit) {
            Some(Some(u)) => Ok(u),
            _ => candle_core::bail!("no buffers for unit {}", slot.unit),
        }
    }

    /// Index of a trained tensor by name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.tensors.iter().position(|t| t.name == name)
    }

    /// What the layers compute with: a view of the shape that files have.
    pub fn view(&self, index: usize) -> Result<Tensor> {
        let slot = &self.slots[index];
        slot.view(&self.unit(slot)?.compute.whole)?.reshape(self.tensors[index].shape.as_slice())
    }

    /// As [`Params::view`], in f32 where the master weights are on the device.
    pub fn wide_view(&self, index: usize) -> Result<Tensor> {
        let (slot, shape) = (&self.slots[index], self.tensors[index].shape.as_slice());
        let unit = self.unit(slot)?;
        let here = unit.master.values.real()?.device().same_device(unit.compute.whole.real()?.device());
        match &unit.wide {
            Some(wide) => slot.view(&wide.whole)?.reshape(shape),
            None if here && !unit.compute.is_apart() => unit.master.whole(slot, shape),
            None => self.view(index),
        }
    }

    /// Whether ranks split what the layers compute with.
    pub fn is_split(&self) -> bool {
        self.shard.is_split()
    }

    /// Whether what the layers compute with comes for a visit and goes after it: from other ranks, or from the host.
    pub fn comes_and_goes(&self) -> bool {
        self.is_split() || self.weights_offloaded
    }

    /// What of a unit has to be gathered before its layer can compute.
    fn gathered(&self, unit: usize) -> impl Iterator<Item = &Buffer> {
        let trained = self.units.get(unit).and_then(Option::as_ref);
        let own = trained.into_iter().flat_map(|u| std::iter::once(&u.compute).chain(&u.wide));
        self.frozen.get(unit).into_iter().flatten().chain(own).filter(|b| b.is_apart())
    }

    /// Begins to bring all weights of a unit here, where they come and go; where ranks split them it is a collective. They
    /// are there for what is computed once each arrival was waited for.
    ///
    /// # Errors
    /// A rank that is lost; of the device.
    pub fn gather(&self, unit: usize, comm: &dyn Comm) -> ft_base::Result<Vec<Arrival>> {
        let at = At::unit("the gathering of weights", unit);
        self.gathered(unit).map(|b| b.gather(at, self.shard, comm)).collect()
    }

    /// Gives the device's memory of a unit's weights back, where they come and go: what is held stays.
    ///
    /// # Errors
    /// Of the device.
    pub fn release(&self, unit: usize) -> Result<()> {
        self.gathered(unit).try_for_each(|b| vacate(&b.whole))
    }

    /// The elements of a tensor that this rank has to set.
    ///
    /// # Errors
    /// As [`Params::unit`].
    pub fn mine(&self, index: usize) -> Result<Range<usize>> {
        let slot = &self.slots[index];
        let here = common(&self.unit(slot)?.compute.held.at, &slot.range());
        Ok(if here.is_empty() { 0..0 } else { here.start - slot.offset..here.end - slot.offset })
    }

    /// The values of a tensor that stay: a view of the master weights, or of what the layers compute with where there are
    /// none.
    ///
    /// # Errors
    /// A tensor of which this rank holds only a part.
    pub fn master(&self, index: usize) -> Result<Tensor> {
        let slot = &self.slots[index];
        self.unit(slot)?.values(slot.range())?.reshape(self.tensors[index].shape.as_slice())
    }

    /// Whether this rank has all values of what trains.
    pub fn has_masters(&self) -> bool {
        let whole = |u: &Unit| u.kept == (0..u.len) || u.compute.held.at == (0..u.len);
        self.units.iter().flatten().all(|u| u.master.at == u.kept && whole(u))
    }

    /// What the values of a tensor are in that stay: f32 where it has master weights.
    ///
    /// # Errors
    /// As [`Params::unit`].
    pub fn stored(&self, index: usize) -> Result<DType> {
        let slot = &self.slots[index];
        let unit = self.unit(slot)?;
        Ok(if unit.keeps(&slot.range()) { DType::F32 } else { unit.compute.whole.dtype() })
    }

    /// The gradient of a tensor, as a view.
    ///
    /// # Errors
    /// As [`Params::master`].
    pub fn grad(&self, index: usize) -> Result<Option<Tensor>> {
        let slot = &self.slots[index];
        let grads = &self.unit(slot)?.grads;
        grads.as_ref().map(|g| g.whole(slot, &self.tensors[index].shape)).transpose()
    }

    /// GaLore's states of a tensor, if its gradient is projected.
    pub fn projected(&self, index: usize) -> Option<&Projected> {
        self.unit(&self.slots[index]).ok()?.projected.iter().find(|p| p.index == index)
    }

    /// Whether a tensor's moments are in 8 bits.
    pub fn is_coded(&self, index: usize) -> bool {
        self.eight_bit && is_large(self.tensors[index].elements())
    }

    /// Sets a tensor, master and compute copy, as far as they are here.
    pub fn set(&self, index: usize, value: &Real) -> Result<()> {
        let slot = &self.slots[index];
        if value.elem_count() != slot.rows * slot.cols {
            candle_core::bail!("{}: {:?} values into {:?}", self.tensors[index].name, value.shape(), slot);
        }
        self.set_from(index, 0, value)
    }

    /// As [`Params::set`], of the values from element `first` of the tensor on.
    pub fn set_from(&self, index: usize, first: usize, value: &Real) -> Result<()> {
        // a device launches nothing for no values, and says so
        if value.elem_count() == 0 {
            return Ok(());
        }
        let slot = &self.slots[index];
        let unit = self.unit(slot)?;
        // rounded where the value is, which is the host nearly always
        let flat = value.to_dtype(DType::F32)?.contiguous()?.flatten_all()?;
        unit.master.set(slot.offset + first, &flat)?;
        let dtype = unit.compute.whole.dtype();
        if !unit.is_master() {
            unit.compute.held.set(slot.offset + first, &flat.to_dtype(dtype)?)?;
        }
        Ok(())
    }

    /// Where the master weights of a trained tensor are: its values are best read to there.
    pub fn home(&self, index: usize) -> Result<&Device> {
        Ok(self.unit(&self.slots[index])?.master.values.real()?.device())
    }

    /// Gradient buffers by unit, as a [`crate::model::sink::Sink`] takes them.
    pub fn grads(&self) -> Vec<Option<Tensor>> {
        let grads = |u: &Unit| u.grads.as_ref().map(|g| g.values.clone());
        self.units.iter().map(|u| u.as_ref().and_then(grads)).collect()
    }

    /// Elements of each unit's buffers.
    pub fn lens(&self) -> Vec<usize> {
        self.units.iter().map(|u| u.as_ref().map_or(0, |u| u.len)).collect()
    }

    /// Sets all gradients to zero, before they are summed anew: nothing to do where the last update did.
    pub fn zero_grads(&self) -> Result<()> {
        if self.zeroed.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        self.units.iter().flatten().filter_map(|u| u.grads.as_ref()).try_for_each(|g| g.values.zero_set())
    }

    /// As [`Params::zero_grads`], where a sink adds to these buffers and can write over what an earlier step left: the parts
    /// that it is to write over.
    pub fn new_sums(&self) -> Result<&[Slot]> {
        let mut grads = self.units.iter().flatten().filter_map(|u| u.grads.as_ref());
        if !self.zeroed.load(Ordering::Relaxed) && grads.all(|g| is_native(&g.values)) {
            return Ok(&self.slots);
        }
        self.zero_grads().map(|()| &[][..])
    }

    /// Number of trained values.
    pub fn count(&self) -> usize {
        self.tensors.iter().map(Trained::elements).sum()
    }

    /// Lowest unit that holds a trained tensor.
    pub fn lowest_unit(&self) -> Option<usize> {
        self.tensors.iter().map(|t| t.unit).min()
    }
}
