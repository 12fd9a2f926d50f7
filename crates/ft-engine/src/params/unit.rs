//! Buffers of the trained tensors of one unit of the walk.

use super::buffers::moments::Moments;
use super::buffers::projected::Projected;
use super::buffers::{Buffer, Held, common};
use candle_core::{DType, Result};
use ft_kernels::Tensor;
use ft_kernels::optimizer::Draws;
use std::ops::Range;

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
    pub(super) number: usize,
    pub(super) seed: u64,
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
