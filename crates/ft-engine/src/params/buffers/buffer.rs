//! Sharded flat buffers: ranges held by a rank, and full buffers during a visit.

use super::allocate::Allocate;
use super::shard::{Shard, common};
use super::split::{FlatKind, Split};
use crate::model::grad_accumulator::Slot;
use crate::ranks::{CollectiveId, Comm};
use candle_core::{DType, Device, Result};
use ft_kernels::Tensor;
use ft_kernels::crossing::{self, Locked, PendingTransfer};
use ft_kernels::resizable::allocate;
use ft_kernels::tensor::Real;
use std::ops::Range;
use std::sync::Arc;

/// A range of a flat buffer on this rank; the whole buffer if nothing is sharded.
#[derive(Clone, Debug)]
pub struct LocalShard {
    /// Element range in the buffer.
    pub at: Range<usize>,
    pub values: Tensor,
}

impl LocalShard {
    pub(crate) fn zeros(at: Range<usize>, device: &Device) -> Result<Self> {
        Ok(Self { values: Tensor::zeros(at.len(), DType::F32, device)?, at })
    }

    /// Whether `values` and `other` are the same tensor.
    pub(crate) fn is(&self, other: &Tensor) -> bool {
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
    pub(crate) fn whole(&self, slot: &Slot, shape: &[usize]) -> Result<Tensor> {
        self.of(slot.range())?.reshape(shape)
    }

    /// Writes the overlap with `flat`, from element `start` of the buffer on.
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
    pub held: LocalShard,
    /// Full buffer on the device; layers have views of it. If separate from `held`, memory is only
    /// allocated while the unit is gathered.
    pub whole: Tensor,
    /// Ranks with copies, and this rank's share.
    pub(super) kind: FlatKind,
    shard: Shard,
    /// Page lock on `held`, if requested.
    _locked: Option<Arc<Locked>>,
}

impl Buffer {
    /// A permanent, fully held buffer.
    pub(crate) fn replicated(len: usize, dtype: DType, device: &Device) -> Result<Self> {
        let whole = Tensor::zeros(len, dtype, device)?;
        let held = LocalShard { at: 0..len, values: whole.clone() };
        Ok(Self { held, whole, kind: FlatKind::Whole, shard: Shard::default(), _locked: None })
    }

    /// A buffer to be gathered: allocates this rank's zero-filled part; `whole` has no memory yet.
    ///
    /// # Errors
    /// Device errors.
    pub fn apart(whole: Tensor, kind: FlatKind, what: Allocate) -> Result<Self> {
        let at = what.split.shard(kind).held(whole.elem_count(), 3);
        let home = if what.offload_weights { &Device::Cpu } else { whole.real()?.device() };
        let values = Tensor::zeros(at.len(), whole.dtype(), home)?;
        Self::of(LocalShard { at, values }, whole, kind, what)
    }

    /// A buffer to be gathered, with the given permanent part.
    pub(crate) fn of(held: LocalShard, whole: Tensor, kind: FlatKind, what: Allocate) -> Result<Self> {
        let lock = what.pin && what.offload_weights;
        let locked = lock.then(|| Locked::new(held.values.real()?, whole.real()?.device())).transpose()?;
        Ok(Self { held, whole, kind, shard: what.split.shard(kind), _locked: locked.map(Arc::new) })
    }

    /// Whether the buffer must be gathered for a visit.
    pub fn is_apart(&self) -> bool {
        !self.held.is(&self.whole)
    }

    /// Bytes held permanently.
    pub fn bytes(&self) -> u64 {
        (self.held.at.len() * self.whole.dtype().size_in_bytes()) as u64
    }

    /// Starts gathering the full buffer. `comm` are all ranks.
    pub(crate) fn gather(
        &self,
        at: CollectiveId,
        split: &Split,
        comm: &dyn Comm,
    ) -> ft_base::Result<PendingTransfer> {
        allocate(&self.whole)?;
        if self.shard.is_split() {
            let parts = self.shard.parts(self.whole.elem_count());
            let (group, own) = (split.group(comm, self.kind), self.held.values.clone());
            return group.all_gather(at, own, &parts, &self.whole);
        }
        Ok(crossing::send(self.held.values.real()?, self.whole.real()?)?)
    }
}
