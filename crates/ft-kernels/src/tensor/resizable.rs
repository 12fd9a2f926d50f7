//! Tensors with storage that can be freed and reallocated while views of them stay valid.
//!
//! Replaces the storage behind a tensor, so that memory is freed while layers keep views. Reading an unallocated
//! tensor is a bug and fails with an out-of-bounds access.

use crate::tensor::{Real, Tensor};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage};
use std::sync::atomic::{AtomicU64, Ordering};

/// Replaces a storage by `n` zeros.
struct Resize(usize);

impl Resize {
    fn of<D: BackendDevice<Storage = S>, S: BackendStorage<Device = D>>(
        &self,
        storage: &mut S,
    ) -> Result<()> {
        *storage = storage.device().zeros_impl(&Shape::from(self.0), storage.dtype())?;
        Ok(())
    }
}

impl InplaceOp1 for Resize {
    fn name(&self) -> &'static str {
        "resize"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        self.of(storage)
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        Resize(self.0.max(1)).of(storage)
    }
}

/// A vector of `len` values with unallocated storage.
///
/// # Errors
/// Errors of the device.
pub fn unallocated(len: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let storage = match device {
        Device::Cpu => Storage::Cpu(candle_core::cpu_backend::CpuDevice.zeros_impl(&Shape::from(0), dtype)?),
        // CUDA rejects empty allocations
        Device::Cuda(cuda) => Storage::Cuda(cuda.zeros_impl(&Shape::from(1), dtype)?),
        Device::Metal(_) => candle_core::bail!("an unallocated tensor on a device that ft does not use"),
    };
    Ok(Real::from_storage(storage, len, BackpropOp::none(), false).into())
}

/// Number of reallocations; addresses may change with each.
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// A counter that changes whenever a tensor may have moved to another address.
pub fn moves() -> u64 {
    ALLOCATIONS.load(Ordering::Acquire)
}

/// Allocates storage for a tensor (not a view), filled with zeros.
///
/// # Errors
/// Errors of the device.
pub fn allocate(t: &Tensor) -> Result<()> {
    ALLOCATIONS.fetch_add(1, Ordering::AcqRel);
    t.real()?.inplace_op1(&Resize(t.elem_count()))
}

/// Frees the storage of a tensor (not a view).
///
/// # Errors
/// Errors of the device.
pub fn free(t: &Tensor) -> Result<()> {
    t.real()?.inplace_op1(&Resize(0))
}

/// Capacity of a CPU tensor's storage in values, for tests.
#[doc(hidden)]
pub fn held(t: &Tensor) -> Result<usize> {
    Ok(match &*t.real()?.storage_and_layout().0 {
        Storage::Cpu(CpuStorage::F32(v)) => v.capacity(),
        Storage::Cpu(CpuStorage::BF16(v)) => v.capacity(),
        Storage::Cpu(CpuStorage::U8(v)) => v.capacity(),
        _ => usize::MAX,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{randn, values};

    #[test]
    fn views_follow_memory_that_is_allocated_again() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            let all = unallocated(64, dtype, &Device::Cpu)?;
            let part = all.narrow(0, 16, 32)?.reshape((4, 8))?;
            for seed in 0..3 {
                assert_eq!(held(&all)?, 0);
                let before = moves();
                allocate(&all)?;
                assert!(held(&all)? >= 64 && moves() > before);
                assert!(values(&part).iter().all(|x| *x == 0.0));
                let new = randn(seed, 64, dtype)?;
                all.slice_set(&new, 0, 0)?;
                assert_eq!(values(&part), values(&new)[16..48]);
                free(&all)?;
            }
        }
        Ok(())
    }
}
