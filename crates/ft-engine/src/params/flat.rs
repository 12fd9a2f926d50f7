//! Buffers of trained tensors: those of one unit of the walk with copies on the same ranks.

use super::buffers::allocate::Allocate;
use super::buffers::layout::FlatLayout;
use super::buffers::moments::Moments;
use super::buffers::projected::Projected;
use super::buffers::{Buffer, FlatKind, LocalShard, Shard, common};
use candle_core::{DType, Device, Result};
use ft_kernels::Tensor;
use ft_kernels::optimizer::Draws;
use ft_kernels::resizable::unallocated;
use std::ops::Range;

/// Flat buffers of one unit and kind.
#[derive(Debug)]
pub struct FlatParam {
    /// Unit of the walk.
    pub unit: usize,
    /// Ranks that hold copies.
    pub kind: FlatKind,
    /// Sharding over these ranks, and this rank's share.
    pub shard: Shard,
    /// Length in elements, including gaps between tensors.
    pub len: usize,
    /// This rank's range, if anything is sharded.
    pub part: Range<usize>,
    /// Weights used by the layers, in the compute dtype.
    pub compute: Buffer,
    /// f32 master weights: this rank's share of the range `kept`. Shares memory with the held part of
    /// `compute` if that is f32 on the same device.
    pub master: LocalShard,
    /// Elements with master weights. For all others, the compute buffer is the only copy: see
    /// [`FlatParam::draws`].
    pub kept: Range<usize>,
    /// Index among all buffers, and seed of stochastic rounding for elements without master weights.
    number: usize,
    seed: u64,
    /// f32 copy for layers using master weights directly, if sharded or offloaded.
    pub wide: Option<Buffer>,
    /// Whether every rank holds all master weights of this unit.
    pub replicated: bool,
    /// f32 gradients; `None` in inference, or if the unit is updated during backward.
    pub grads: Option<LocalShard>,
    /// AdamW's moments, except for projected matrices.
    pub moments: Option<Moments>,
    /// GaLore state of projected matrices.
    pub projected: Vec<Projected>,
}

/// A buffer to allocate and its devices.
#[derive(Clone)]
pub(super) struct Placement<'a> {
    /// Unit of the walk, and kind.
    pub(super) of: (usize, FlatKind),
    /// Index among all buffers.
    pub(super) number: usize,
    /// Elements with master weights.
    pub(super) kept: Range<usize>,
    /// Whether layers use f32 master weights directly.
    pub(super) wide: bool,
    /// Compute dtype.
    pub(super) dtype: DType,
    pub(super) device: &'a Device,
    /// Device of master weights and moments.
    pub(super) home: &'a Device,
}

impl FlatParam {
    /// Allocates zero-filled buffers.
    pub(super) fn new(
        layout: FlatLayout,
        place: Placement<'_>,
        what: Allocate,
        projected: Vec<Projected>,
    ) -> Result<Self> {
        let Placement { of: (unit, kind), number, kept, wide, dtype, device, home } = place;
        let (len, shard) = (layout.len, what.split.shard(kind));
        let gathered = shard.is_split() || what.offload_weights;
        let compute = if gathered {
            Buffer::apart(unallocated(len, dtype, device)?, kind, what)?
        } else {
            Buffer::replicated(len, dtype, device)?
        };
        let states = shard.held(len, 1);
        let same = dtype == DType::F32 && what.offload == what.offload_weights;
        let replicated = !shard.is_split() && (same || shard.stage == 0 || wide);
        let master = match (same, replicated) {
            (true, _) => compute.held.clone(),
            (_, true) => LocalShard::zeros(kept.clone(), home)?,
            _ => LocalShard::zeros(common(&states, &kept), home)?,
        };
        // In f32, the compute buffer has the same values.
        let copies = gathered && wide && dtype != DType::F32;
        let wide = if copies && (what.offload_weights || home.same_device(device)) {
            Some(Buffer::of(master.clone(), unallocated(len, DType::F32, device)?, kind, what)?)
        } else {
            None
        };
        let grads = || LocalShard::zeros(shard.held(len, 2), device);
        let large = if what.eight_bit { layout.large } else { 0 };
        let moments = || Moments::new(&common(&states, &(0..layout.plain)), large, home);
        Ok(Self {
            unit,
            kind,
            shard,
            len,
            part: shard.part(len),
            replicated,
            master,
            kept,
            number,
            seed: what.rounding.unwrap_or(0),
            wide,
            compute,
            grads: (what.train && !what.in_backward).then(grads).transpose()?,
            moments: what.train.then(moments).transpose()?,
            projected,
        })
    }

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

    /// Authoritative values of a range: f32 master weights, or else compute weights.
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

    /// Calls `change` with the compute weights of a range on `device`: the held ones, or if on another device a copy,
    /// then written back.
    ///
    /// # Errors
    /// A range not fully held by this rank; device errors; errors of `change`.
    pub fn compute_on(
        &self,
        range: Range<usize>,
        device: &Device,
        change: impl FnOnce(&Tensor) -> Result<()>,
    ) -> Result<()> {
        let held = self.compute.held.of(range)?;
        let home = held.real()?.device();
        if home.same_device(device) {
            return change(&held);
        }
        // candle moves the whole storage of a view
        let copy: Tensor = held.real()?.force_contiguous()?.to_device(device)?.into();
        change(&copy)?;
        held.slice_set(&copy.real()?.to_device(home)?.into(), 0, 0)
    }

    /// Whether the held compute weights and the master weights are the same memory.
    pub fn is_master(&self) -> bool {
        self.master.is(&self.compute.held.values)
    }
}
