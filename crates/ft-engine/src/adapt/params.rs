//! Trained tensors in flat buffers, one set per unit of the walk.
//!
//! A unit (embedding, layer or head) stores all trained tensors end to end, so that reduction, norm,
//! clipping and optimizer take one pass per unit. Layers use views of the `compute` buffer; a step updates
//! it in place, without copies, unless master weights and moments are offloaded to the host
//! (`memory.offload`). With ZeRO, a rank holds a range of every unit's buffer; with offloaded weights, the
//! device holds nothing permanently. In both cases compute weights are gathered before a visit to the unit
//! and released afterwards.

use super::buffer::{Buffer, Held, Shard, common};
use super::layout::{layout, wide_units};
use super::moments::{Moments, is_large};
use super::projected::{Projected, Projection};
use super::selection::Trained;
use crate::load::Initials;
use crate::model::sink::Slot;
use crate::ranks::{At, Comm};
use candle_core::{DType, Device, Result};
use ft_kernels::Tensor;
use ft_kernels::cpu::is_native;
use ft_kernels::crossing::Arrival;
use ft_kernels::optimizer::Draws;
use ft_kernels::tensor::Real;
use ft_kernels::vacant::{vacant, vacate};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Buffers of one unit.
#[derive(Debug)]
pub struct Unit {
    /// Length in elements, including gaps between tensors.
    pub len: usize,
    /// This rank's range, if anything is sharded.
    pub part: Range<usize>,
    /// Weights used by the layers, in the compute dtype.
    pub compute: Buffer,
    /// f32 master weights: this rank's share of the range `kept`. Shares memory with the held part of
    /// `compute` if that is f32 on the same device.
    pub master: Held,
    /// Elements with master weights. For all others, the compute buffer is the only copy: see
    /// [`Unit::draws`].
    pub kept: Range<usize>,
    /// Unit index in the walk, and seed of stochastic rounding for elements without master weights.
    number: usize,
    seed: u64,
    /// f32 copy for layers that use master weights directly, if sharded or offloaded.
    pub wide: Option<Buffer>,
    /// Whether every rank holds all master weights of this unit.
    pub replicated: bool,
    /// f32 gradients; `None` in inference, or if the unit is updated during backward.
    pub grads: Option<Held>,
    /// AdamW's moments, except for projected matrices.
    pub moments: Option<Moments>,
    /// GaLore state of projected matrices.
    pub projected: Vec<Projected>,
}

/// All trained tensors of a model.
#[derive(Debug)]
pub struct Params {
    /// Trained tensors in the order of the forward pass.
    pub tensors: Vec<Trained>,
    /// Slot of each tensor.
    pub slots: Vec<Slot>,
    /// Buffers by unit; `None` if nothing trains.
    pub units: Vec<Option<Unit>>,
    /// Frozen weights by unit, if sharded or offloaded; otherwise empty.
    pub frozen: Vec<Vec<Buffer>>,
    /// Whether master weights and moments are on the host.
    pub offloaded: bool,
    /// Whether compute weights are on the host and copied to the device for each visit.
    pub weights_offloaded: bool,
    /// Whether host buffers for transfers are page-locked.
    pub pin: bool,
    /// Whether large tensors have 8-bit moments.
    pub eight_bit: bool,
    /// Gradient projection.
    pub projection: Projection,
    /// Whether units are updated during the backward pass.
    pub in_backward: bool,
    /// Sharding and this rank's share.
    pub shard: Shard,
    /// LoRA initializations from the base, if any.
    pub initials: Option<Arc<Initials>>,
    /// Whether all gradients are zero already, left so by the last update.
    pub zeroed: AtomicBool,
}

/// Options for allocations besides the compute weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocate {
    /// Gradients and moments.
    pub train: bool,
    /// No persistent gradients: a unit's gradients exist during its backward visit
    /// (`optimizer.in_backward`).
    pub in_backward: bool,
    /// Master weights and moments on the host (`memory.offload = ["optimizer"]`).
    pub offload: bool,
    /// Compute weights on the host, frozen ones included (`memory.offload = ["params"]`).
    pub offload_weights: bool,
    /// Page-locked host memory for transfers (`memory.pin`).
    pub pin: bool,
    /// 8-bit moments for large tensors (`optimizer.name = "adamw8bit"`).
    pub eight_bit: bool,
    /// Seed of stochastic rounding for fully trained 16-bit weights without f32 master weights
    /// (`optimizer.master = "none"`).
    pub rounding: Option<u64>,
    /// Rank of gradient projection (`optimizer.name = "galore"`); 0 disables it.
    pub project: usize,
    /// Sharding and this rank's share.
    pub shard: Shard,
}

impl Unit {
    /// Buffers updated by parts on each rank but needed in full by all.
    pub fn shared(&self) -> impl Iterator<Item = &Tensor> {
        let apart = self.replicated && !self.is_master();
        std::iter::once(&self.compute.held.values).chain(apart.then_some(&self.master.values))
    }

    /// Whether all elements of a range have master weights; fully trained 16-bit weights may have none.
    pub fn keeps(&self, range: &Range<usize>) -> bool {
        self.kept.start <= range.start && range.end <= self.kept.end
    }

    /// Splits a range into parts without, with, and without master weights.
    pub fn by_kept(&self, range: &Range<usize>) -> [Range<usize>; 3] {
        let ends = [0..self.kept.start, self.kept.clone(), self.kept.end..self.len];
        ends.map(|part| common(&part, range))
    }

    /// Random numbers for stochastic rounding in update `t` (from 1), for elements from `start`.
    pub fn draws(&self, t: u64, start: usize) -> Draws {
        Draws::new(self.seed, t, self.number, start)
    }

    /// Authoritative values of a range: f32 master weights, or compute weights if there are no master
    /// weights.
    ///
    /// # Errors
    /// A range not fully held by this rank.
    pub fn values(&self, range: Range<usize>) -> Result<Tensor> {
        if self.keeps(&range) { self.master.of(range) } else { self.compute.held.of(range) }
    }

    /// Copies master weights to the compute buffer, converting dtype and device.
    ///
    /// # Errors
    /// A range not fully held by this rank; device errors.
    pub fn refresh(&self, range: Range<usize>) -> Result<()> {
        if self.is_master() || !self.keeps(&range) {
            return Ok(());
        }
        let (values, to) = (self.master.of(range.clone())?, self.compute.held.of(range)?);
        let values = match self.compute.whole.dtype() {
            // A separate tensor, not a view of the master weights.
            DType::F32 => values.force_contiguous()?,
            dtype => values.to_dtype(dtype)?,
        };
        to.slice_set(&values.real()?.to_device(to.real()?.device())?.into(), 0, 0)
    }

    /// Whether the held compute weights and the master weights are the same memory.
    pub fn is_master(&self) -> bool {
        self.master.is(&self.compute.held.values)
    }
}

impl Params {
    /// Allocates zero-filled buffers for these tensors.
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
                // If layers use some master weights directly, the whole unit keeps them.
                let kept = match what.rounding.is_none() || dtype == DType::F32 || wide {
                    true => 0..len,
                    false => ends.large_full[number]..ends.adapters[number],
                };
                let master = match (same, replicated) {
                    (true, _) => compute.held.clone(),
                    (_, true) => Held::zeros(kept.clone(), home)?,
                    _ => Held::zeros(common(&states, &kept), home)?,
                };
                // In f32, the compute buffer has the same values.
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

    /// Buffers of a slot's unit.
    ///
    /// # Errors
    /// A unit without trained tensors.
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

    /// View of the compute weights, in the shape used in files.
    pub fn view(&self, index: usize) -> Result<Tensor> {
        let slot = &self.slots[index];
        slot.view(&self.unit(slot)?.compute.whole)?.reshape(self.tensors[index].shape.as_slice())
    }

    /// As [`Params::view`], but in f32 if master weights are on the device.
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

    /// Whether compute weights are sharded (ZeRO stage 3).
    pub fn is_split(&self) -> bool {
        self.shard.is_split()
    }

    /// Whether compute weights are gathered for a visit and released afterwards: sharded or offloaded.
    pub fn comes_and_goes(&self) -> bool {
        self.is_split() || self.weights_offloaded
    }

    /// Buffers to gather before a unit can compute.
    fn gathered(&self, unit: usize) -> impl Iterator<Item = &Buffer> {
        let trained = self.units.get(unit).and_then(Option::as_ref);
        let own = trained.into_iter().flat_map(|u| std::iter::once(&u.compute).chain(&u.wide));
        self.frozen.get(unit).into_iter().flatten().chain(own).filter(|b| b.is_apart())
    }

    /// Starts gathering all weights of a unit, if sharded or offloaded; collective if sharded. The weights
    /// are usable after waiting for every arrival.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn gather(&self, unit: usize, comm: &dyn Comm) -> ft_base::Result<Vec<Arrival>> {
        let at = At::unit("the gathering of weights", unit);
        self.gathered(unit).map(|b| b.gather(at, self.shard, comm)).collect()
    }

    /// Frees the device memory of a unit's gathered weights. Held parts remain.
    ///
    /// # Errors
    /// Device errors.
    pub fn release(&self, unit: usize) -> Result<()> {
        self.gathered(unit).try_for_each(|b| vacate(&b.whole))
    }

    /// Elements of a tensor to be set by this rank.
    ///
    /// # Errors
    /// As [`Params::unit`].
    pub fn mine(&self, index: usize) -> Result<Range<usize>> {
        let slot = &self.slots[index];
        let here = common(&self.unit(slot)?.compute.held.at, &slot.range());
        Ok(if here.is_empty() { 0..0 } else { here.start - slot.offset..here.end - slot.offset })
    }

    /// Authoritative values of a tensor: a view of the master weights, or of the compute weights if there
    /// are none.
    ///
    /// # Errors
    /// A tensor only partly held by this rank.
    pub fn master(&self, index: usize) -> Result<Tensor> {
        let slot = &self.slots[index];
        self.unit(slot)?.values(slot.range())?.reshape(self.tensors[index].shape.as_slice())
    }

    /// Whether this rank holds the authoritative values of all trained tensors.
    pub fn has_masters(&self) -> bool {
        let whole = |u: &Unit| u.kept == (0..u.len) || u.compute.held.at == (0..u.len);
        self.units.iter().flatten().all(|u| u.master.at == u.kept && whole(u))
    }

    /// Dtype of a tensor's authoritative values: f32 with master weights.
    ///
    /// # Errors
    /// As [`Params::unit`].
    pub fn stored(&self, index: usize) -> Result<DType> {
        let slot = &self.slots[index];
        let unit = self.unit(slot)?;
        Ok(if unit.keeps(&slot.range()) { DType::F32 } else { unit.compute.whole.dtype() })
    }

    /// View of a tensor's gradient.
    ///
    /// # Errors
    /// As [`Params::master`].
    pub fn grad(&self, index: usize) -> Result<Option<Tensor>> {
        let slot = &self.slots[index];
        let grads = &self.unit(slot)?.grads;
        grads.as_ref().map(|g| g.whole(slot, &self.tensors[index].shape)).transpose()
    }

    /// GaLore state of a tensor, if the gradient is projected.
    pub fn projected(&self, index: usize) -> Option<&Projected> {
        self.unit(&self.slots[index]).ok()?.projected.iter().find(|p| p.index == index)
    }

    /// Whether a tensor's moments are in 8 bits.
    pub fn is_coded(&self, index: usize) -> bool {
        self.eight_bit && is_large(self.tensors[index].elements())
    }

    /// Sets the locally held part of a tensor, in master and compute weights.
    pub fn set(&self, index: usize, value: &Real) -> Result<()> {
        let slot = &self.slots[index];
        if value.elem_count() != slot.rows * slot.cols {
            candle_core::bail!("{}: {:?} values into {:?}", self.tensors[index].name, value.shape(), slot);
        }
        self.set_from(index, 0, value)
    }

    /// As [`Params::set`], for the values from element `first` of the tensor on.
    pub fn set_from(&self, index: usize, first: usize, value: &Real) -> Result<()> {
        // CUDA rejects launches without elements.
        if value.elem_count() == 0 {
            return Ok(());
        }
        let slot = &self.slots[index];
        let unit = self.unit(slot)?;
        // Converted on the device of `value`, nearly always the host.
        let flat = value.to_dtype(DType::F32)?.contiguous()?.flatten_all()?;
        unit.master.set(slot.offset + first, &flat)?;
        let dtype = unit.compute.whole.dtype();
        if !unit.is_master() {
            unit.compute.held.set(slot.offset + first, &flat.to_dtype(dtype)?)?;
        }
        Ok(())
    }

    /// Device of a tensor's master weights; the best one to read values to.
    pub fn home(&self, index: usize) -> Result<&Device> {
        Ok(self.unit(&self.slots[index])?.master.values.real()?.device())
    }

    /// Gradient buffers by unit, for a [`crate::model::sink::Sink`].
    pub fn grads(&self) -> Vec<Option<Tensor>> {
        let grads = |u: &Unit| u.grads.as_ref().map(|g| g.values.clone());
        self.units.iter().map(|u| u.as_ref().and_then(grads)).collect()
    }

    /// Buffer length of every unit, in elements.
    pub fn lens(&self) -> Vec<usize> {
        self.units.iter().map(|u| u.as_ref().map_or(0, |u| u.len)).collect()
    }

    /// Zeroes all gradients, unless the last update left them zero.
    pub fn zero_grads(&self) -> Result<()> {
        if self.zeroed.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        self.units.iter().flatten().filter_map(|u| u.grads.as_ref()).try_for_each(|g| g.values.zero_set())
    }

    /// As [`Params::zero_grads`], but if the sink can overwrite leftovers of an earlier step, returns the
    /// slots to overwrite instead of zeroing them.
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

    /// Lowest unit with a trained tensor.
    pub fn lowest_unit(&self) -> Option<usize> {
        self.tensors.iter().map(|t| t.unit).min()
    }
}
