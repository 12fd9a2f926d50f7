//! Values that come and go behind a tensor's handles: views stay what they are, and see what is there.
//!
//! A tensor's storage is swapped, so that its memory is given back while layers keep their views of it. Who reads a
//! vacant tensor has a bug: its values are out of bounds.

use super::tensor::{Real, Tensor};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage};
use std::sync::atomic::{AtomicU64, Ordering};

/// Gives a storage so many values, all zero.
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

/// A vector of `len` values that has none of them yet.
///
/// # Errors
/// Of the device.
pub fn vacant(len: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let storage = match device {
        Device::Cpu => Storage::Cpu(candle_core::cpu_backend::CpuDevice.zeros_impl(&Shape::from(0), dtype)?),
        // no bytes are no address: the driver refuses
        Device::Cuda(cuda) => Storage::Cuda(cuda.zeros_impl(&Shape::from(1), dtype)?),
        Device::Metal(_) => candle_core::bail!("a vacant tensor on a device that ft does not use"),
    };
    Ok(Real::from_storage(storage, len, BackpropOp::none(), false).into())
}

/// How often a tensor was occupied: addresses of what is there may be others since.
static OCCUPIED: AtomicU64 = AtomicU64::new(0);

/// A number that is another whenever values may have come to another address.
pub fn moves() -> u64 {
    OCCUPIED.load(Ordering::Acquire)
}

/// Gives a tensor that is all of its storage values, zeros.
///
/// # Errors
/// Of the device.
pub fn occupy(t: &Tensor) -> Result<()> {
    OCCUPIED.fetch_add(1, Ordering::AcqRel);
    t.real()?.inplace_op1(&Resize(t.elem_count()))
}

/// Gives the memory of a tensor back that is all of its storage.
///
/// # Errors
/// Of the device.
pub fn vacate(t: &Tensor) -> Result<()> {
    t.real()?.inplace_op1(&Resize(0))
}

/// Values that a tensor's memory on the CPU has room for.
#[cfg(test)]
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
    fn views_see_what_is_there() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            let all = vacant(64, dtype, &Device::Cpu)?;
            let part = all.narrow(0, 16, 32)?.reshape((4, 8))?;
            for seed in 0..3 {
                assert_eq!(held(&all)?, 0);
                let before = moves();
                occupy(&all)?;
                assert!(held(&all)? >= 64 && moves() > before);
                assert!(values(&part).iter().all(|x| *x == 0.0));
                let new = randn(seed, 64, dtype)?;
                all.slice_set(&new, 0, 0)?;
                assert_eq!(values(&part), values(&new)[16..48]);
                vacate(&all)?;
            }
        }
        Ok(())
    }
}
