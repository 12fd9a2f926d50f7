//! What ranks hold of flat buffers: ranges, and what comes whole for a visit and goes after it.

use super::params::Allocate;
use crate::comm::{At, Comm};
use ft_kernels::crossing::{self, Arrival, Locked};
use ft_kernels::tensor::Real;
use ft_kernels::vacant::occupy;
use ft_kernels::{Tensor, optimizer};
use crate::model::sink::Slot;
use candle_core::{DType, Device, Result};
use std::ops::Range;
use std::sync::Arc;

/// Elements that a tensor's offset is a multiple of: no block of 8-bit moments holds values of two tensors, or of two ranks.
pub const ALIGN: usize = optimizer::BLOCK;

/// What a rank holds of what could be split, by the ZeRO stage (Rajbhandari et al., 2020).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Which part is this rank's.
    pub rank: usize,
    /// Of how many.
    pub ranks: usize,
    /// 0: each rank holds all; from 1 on a part of master weights and moments, from 2 on of gradients too, from 3 on of
    /// the weights that layers compute with, frozen ones among them.
    pub stage: u8,
}

impl Default for Shard {
    /// All of it, on one rank.
    fn default() -> Self {
        Self { rank: 0, ranks: 1, stage: 0 }
    }
}

impl Shard {
    /// The parts of a buffer of `len` elements, by rank: as even as blocks of [`ALIGN`] allow.
    pub fn parts(self, len: usize) -> Vec<Range<usize>> {
        let blocks = len.div_ceil(ALIGN);
        let at = |rank: usize| (blocks * rank / self.ranks * ALIGN).min(len);
        (0..self.ranks).map(|r| at(r)..at(r + 1)).collect()
    }

    /// This rank's part.
    pub fn part(self, len: usize) -> Range<usize> {
        self.parts(len).swap_remove(self.rank)
    }

    /// Whether ranks split the weights that layers compute with.
    pub fn is_split(self) -> bool {
        self.ranks > 1 && self.stage >= 3
    }

    /// What this rank holds of what is split from `stage` on.
    pub fn held(self, len: usize, stage: u8) -> Range<usize> {
        if self.stage >= stage { self.part(len) } else { 0..len }
    }
}

/// The values of a range of a unit's buffer.
#[derive(Clone, Debug)]
pub struct Held {
    /// Which elements of the buffer.
    pub at: Range<usize>,
    /// Their values.
    pub values: Tensor,
}

impl Held {
    pub(super) fn zeros(at: Range<usize>, device: &Device) -> Result<Self> {
        Ok(Self { values: Tensor::zeros(at.len(), DType::F32, device)?, at })
    }

    /// Whether its values are that very buffer.
    pub(super) fn is(&self, other: &Tensor) -> bool {
        matches!((&self.values, other), (Tensor::Real(a), Tensor::Real(b)) if a.id() == b.id())
    }

    /// The values of a range of the buffer, as a view.
    ///
    /// # Errors
    /// A range that is not all here.
    pub fn of(&self, range: Range<usize>) -> Result<Tensor> {
        if range.start < self.at.start || range.end > self.at.end {
            candle_core::bail!("elements {range:?} of a buffer: here are {:?}", self.at);
        }
        self.values.narrow(0, range.start - self.at.start, range.len())
    }

    /// A tensor, where all of it is here.
    pub(super) fn whole(&self, slot: &Slot, shape: &[usize]) -> Result<Tensor> {
        self.of(slot.range())?.reshape(shape)
    }

    /// Sets those elements that are here of `flat`, which are the buffer's from `start` on.
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

/// A buffer of what layers compute with.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// What is there all the time: all of it, or this rank's part; on the device, or on the host.
    pub held: Held,
    /// All of it on the device, of which layers have views. Where it is not that which is held, it is vacant but while the
    /// unit is gathered.
    pub whole: Tensor,
    /// Keeps what is held in memory, where that was asked for.
    _locked: Option<Arc<Locked>>,
}

impl Buffer {
    /// One that is held whole.
    pub(super) fn replicated(len: usize, dtype: DType, device: &Device) -> Result<Self> {
        let whole = Tensor::zeros(len, dtype, device)?;
        Ok(Self { held: Held { at: 0..len, values: whole.clone() }, whole, _locked: None })
    }

    /// Of one that comes and goes, what this rank holds, zeros; `whole` is vacant.
    ///
    /// # Errors
    /// Of the device.
    pub fn apart(whole: Tensor, what: Allocate) -> Result<Self> {
        let at = what.shard.held(whole.elem_count(), 3);
        let home = if what.offload_weights { &Device::Cpu } else { whole.real()?.device() };
        let values = Tensor::zeros(at.len(), whole.dtype(), home)?;
        Self::of(Held { at, values }, whole, what)
    }

    /// One that comes and goes, and holds that.
    pub(super) fn of(held: Held, whole: Tensor, what: Allocate) -> Result<Self> {
        let lock = what.pin && what.offload_weights;
        let locked = lock.then(|| Locked::new(held.values.real()?, whole.real()?.device())).transpose()?;
        Ok(Self { held, whole, _locked: locked.map(Arc::new) })
    }

    /// Whether it comes for a visit and goes after it.
    pub fn is_apart(&self) -> bool {
        !self.held.is(&self.whole)
    }

    /// Bytes that are here all the time.
    pub fn bytes(&self) -> u64 {
        (self.held.at.len() * self.whole.dtype().size_in_bytes()) as u64
    }

    /// Begins to bring all of it here.
    pub(super) fn gather(&self, at: At, shard: Shard, comm: &dyn Comm) -> ft_base::Result<Arrival> {
        occupy(&self.whole)?;
        if shard.is_split() {
            let parts = shard.parts(self.whole.elem_count());
            return comm.gather(at, self.held.values.clone(), &parts, &self.whole);
        }
        Ok(crossing::send(self.held.values.real()?, self.whole.real()?)?)
    }
}

/// What two ranges have in common; an empty range where that is nothing.
pub fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However a buffer is split, every element is in one part, and parts are even.
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
