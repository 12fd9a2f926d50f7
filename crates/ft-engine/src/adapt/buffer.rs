//! Sharded flat buffers: ranges held by a rank, and full buffers that exist during a visit.

use super::params::Allocate;
use crate::model::sink::Slot;
use crate::ranks::{At, Comm};
use candle_core::{DType, Device, Result};
use ft_kernels::crossing::{self, Arrival, Locked};
use ft_kernels::tensor::Real;
use ft_kernels::vacant::occupy;
use ft_kernels::{Tensor, optimizer};
use std::ops::Range;
use std::sync::Arc;

/// Alignment of tensor offsets, in elements: no block of 8-bit moments spans two tensors or two ranks.
pub const ALIGN: usize = optimizer::BLOCK;

/// Sharding by ZeRO stage (Rajbhandari et al., 2020).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// ZeRO stage. 0: everything replicated; 1 and up: master weights and moments sharded; 2 and up:
    /// gradients too; 3: compute weights too, frozen ones included.
    pub stage: u8,
}

impl Default for Shard {
    /// One rank without sharding.
    fn default() -> Self {
        Self { rank: 0, ranks: 1, stage: 0 }
    }
}

impl Shard {
    /// Ranges of all ranks in a buffer of `len` elements, as even as blocks of [`ALIGN`] permit.
    pub fn parts(self, len: usize) -> Vec<Range<usize>> {
        let blocks = len.div_ceil(ALIGN);
        let at = |rank: usize| (blocks * rank / self.ranks * ALIGN).min(len);
        (0..self.ranks).map(|r| at(r)..at(r + 1)).collect()
    }

    /// This rank's range.
    pub fn part(self, len: usize) -> Range<usize> {
        self.parts(len).swap_remove(self.rank)
    }

    /// Whether compute weights are sharded.
    pub fn is_split(self) -> bool {
        self.ranks > 1 && self.stage >= 3
    }

    /// This rank's range of anything sharded from `stage` on.
    pub fn held(self, len: usize, stage: u8) -> Range<usize> {
        if self.stage >= stage { self.part(len) } else { 0..len }
    }
}

/// A range of a unit's buffer.
#[derive(Clone, Debug)]
pub struct Held {
    /// Element range in the buffer.
    pub at: Range<usize>,
    pub values: Tensor,
}

impl Held {
    pub(super) fn zeros(at: Range<usize>, device: &Device) -> Result<Self> {
        Ok(Self { values: Tensor::zeros(at.len(), DType::F32, device)?, at })
    }

    /// Whether `values` and `other` are the same tensor.
    pub(super) fn is(&self, other: &Tensor) -> bool {
        matches!((&self.values, other), (Tensor::Real(a), Tensor::Real(b)) if a.id() == b.id())
    }

    /// View of a range of the buffer.
    ///
    /// # Errors
    /// A range not fully held.
    pub fn of(&self, range: Range<usize>) -> Result<Tensor> {
        if range.start < self.at.start || range.end > self.at.end {
            candle_core::bail!("elements {range:?} of a buffer: here are {:?}", self.at);
        }
        self.values.narrow(0, range.start - self.at.start, range.len())
    }

    /// View of a tensor; must be fully held.
    pub(super) fn whole(&self, slot: &Slot, shape: &[usize]) -> Result<Tensor> {
        self.of(slot.range())?.reshape(shape)
    }

    /// Writes the overlap with `flat`, which starts at element `start` of the buffer.
    pub fn set(&self, start: usize, flat: &Real) -> Result<()> {
        let all = start..start + flat.elem_count();
        let here = common(&self.at, &all);
        if here.is_empty() {
            return Ok(());
        }
        let to = self.values.real()?;
        let part = match here == all {
            true => flat.clone(),
            false => flat.narrow(0, here.start - start, here.len())?.force_contiguous()?,
        };
        to.slice_set(&part.to_device(to.device())?, 0, here.start - self.at.start)
    }
}

/// A buffer of compute weights.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// Permanent part: the whole buffer or this rank's range, on the device or the host.
    pub held: Held,
    /// Full buffer on the device; layers have views of it. If separate from `held`, memory is only
    /// allocated while the unit is gathered.
    pub whole: Tensor,
    /// Page lock on `held`, if requested.
    _locked: Option<Arc<Locked>>,
}

impl Buffer {
    /// A permanent, fully held buffer.
    pub(super) fn replicated(len: usize, dtype: DType, device: &Device) -> Result<Self> {
        let whole = Tensor::zeros(len, dtype, device)?;
        Ok(Self { held: Held { at: 0..len, values: whole.clone() }, whole, _locked: None })
    }

    /// A buffer to be gathered: allocates this rank's zero-filled part; `whole` has no memory yet.
    ///
    /// # Errors
    /// Device errors.
    pub fn apart(whole: Tensor, what: Allocate) -> Result<Self> {
        let at = what.shard.held(whole.elem_count(), 3);
        let home = if what.offload_weights { &Device::Cpu } else { whole.real()?.device() };
        let values = Tensor::zeros(at.len(), whole.dtype(), home)?;
        Self::of(Held { at, values }, whole, what)
    }

    /// A buffer to be gathered, with the given permanent part.
    pub(super) fn of(held: Held, whole: Tensor, what: Allocate) -> Result<Self> {
        let lock = what.pin && what.offload_weights;
        let locked = lock.then(|| Locked::new(held.values.real()?, whole.real()?.device())).transpose()?;
        Ok(Self { held, whole, _locked: locked.map(Arc::new) })
    }

    /// Whether the buffer must be gathered for a visit.
    pub fn is_apart(&self) -> bool {
        !self.held.is(&self.whole)
    }

    /// Bytes held permanently.
    pub fn bytes(&self) -> u64 {
        (self.held.at.len() * self.whole.dtype().size_in_bytes()) as u64
    }

    /// Starts gathering the full buffer.
    pub(super) fn gather(&self, at: At, shard: Shard, comm: &dyn Comm) -> ft_base::Result<Arrival> {
        occupy(&self.whole)?;
        if shard.is_split() {
            let parts = shard.parts(self.whole.elem_count());
            return comm.all_gather(at, self.held.values.clone(), &parts, &self.whole);
        }
        Ok(crossing::send(self.held.values.real()?, self.whole.real()?)?)
    }
}

/// Intersection of two ranges; empty if disjoint.
pub fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts cover every element once and are even.
    #[test]
    fn parts_cover_a_buffer() {
        for len in [0, 1, 64, 65, 640, 64 * 7, 64 * 1001] {
            for ranks in [1, 2, 3, 4, 8, 100] {
                let shard = Shard { rank: ranks - 1, ranks, stage: 1 };
                let parts = shard.parts(len);
                assert_eq!((parts.len(), parts[0].start, parts[ranks - 1].end), (ranks, 0, len));
                assert!(parts.windows(2).all(|w| w[0].end == w[1].start), "{parts:?}");
                let even = len / ranks;
                assert!(parts.iter().all(|p| p.len().abs_diff(even) <= ALIGN), "{len} {parts:?}");
                assert_eq!((shard.part(len), shard.held(len, 2)), (parts[ranks - 1].clone(), 0..len));
            }
        }
        assert_eq!((common(&(2..5), &(4..9)), common(&(2..5), &(7..9)).len()), (4..5, 0));
    }
}
