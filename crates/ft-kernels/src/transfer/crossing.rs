//! Asynchronous copies between host and device, and between devices.
//!
//! On CUDA each direction of host-device copies has a stream (`cuda::staging`), and collectives have another
//! (`cuda::nccl`). The compute stream waits for a copy only on request. On the CPU a copy completes at once.

use crate::tensor::{Real, Tensor};
use candle_core::{Device, Result};

/// A copy in progress, or a sum over ranks. After [`PendingTransfer::wait`], work submitted to the device sees the
/// values and may overwrite the source.
#[derive(Debug, Default)]
pub struct PendingTransfer {
    #[cfg(feature = "cuda")]
    transfer: Option<Transfer>,
}

/// Kind of copy.
#[cfg(feature = "cuda")]
#[derive(Debug)]
enum Transfer {
    Copy(crate::cuda::staging::Crossing),
    /// Transfer from other ranks. The tensors in `_retained` live until the transfer
    /// completes; `sum` is added afterwards.
    Flight {
        flight: crate::cuda::nccl::Flight,
        _retained: Retained,
        sum: Option<(crate::sum::Parts, Tensor)>,
    },
}

/// Tensors and the preceding copy kept alive until a transfer completes.
#[cfg(feature = "cuda")]
type Retained = (Vec<Tensor>, Option<Box<PendingTransfer>>);

#[cfg(feature = "cuda")]
impl Transfer {
    fn wait(&self) -> Result<()> {
        match self {
            Transfer::Copy(copy) => copy.wait(),
            Transfer::Flight { flight, .. } => flight.wait(),
        }
    }
}

impl PendingTransfer {
    /// A completed copy.
    pub fn over() -> Self {
        Self::default()
    }

    /// A transfer from other ranks. Keeps `retained` and the preceding copy `before` alive; [`PendingTransfer::wait`]
    /// adds `sum` to its destination.
    #[cfg(feature = "cuda")]
    pub fn of(
        flight: crate::cuda::nccl::Flight,
        retained: Vec<Tensor>,
        before: Option<Self>,
        sum: Option<(crate::sum::Parts, Tensor)>,
    ) -> Self {
        Self { transfer: Some(Transfer::Flight { flight, _retained: (retained, before.map(Box::new)), sum }) }
    }

    /// Event of a host-device copy.
    #[cfg(feature = "cuda")]
    pub fn event(&self) -> Option<&candle_core::cuda_backend::cudarc::driver::CudaEvent> {
        match &self.transfer {
            Some(Transfer::Copy(copy)) => Some(copy.event()),
            _ => None,
        }
    }

    /// Makes the compute stream wait for the copy; the host does not block.
    ///
    /// # Errors
    /// Errors of the driver.
    #[cfg_attr(not(feature = "cuda"), allow(unused_mut))]
    pub fn wait(mut self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(transfer) = self.transfer.take() {
            transfer.wait()?;
            if let Transfer::Flight { sum: Some((parts, to)), .. } = &transfer {
                parts.add_to(to)?;
            }
        }
        Ok(())
    }
}

/// Memory of a pending copy must not be reused: dropping waits as well.
#[cfg(feature = "cuda")]
impl Drop for PendingTransfer {
    fn drop(&mut self) {
        // a failed driver reports the error again on the next call
        let _ = self.transfer.as_ref().map(Transfer::wait);
    }
}

/// Starts a copy between two vectors, at least one of them on the host. The source must not change until the copy has
/// completed.
///
/// # Errors
/// Errors of the driver; vectors of different dtypes.
pub fn send(from: &Real, to: &Real) -> Result<PendingTransfer> {
    #[cfg(feature = "cuda")]
    if let Some(copy) = crate::cuda::staging::copy(from, to)? {
        return Ok(PendingTransfer { transfer: Some(Transfer::Copy(copy)) });
    }
    if to.elem_count() > 0 {
        to.slice_set(from, 0, 0)?;
    }
    Ok(PendingTransfer::over())
}

/// Page-locks host memory of a tensor while this value lives. Copies from and to a device
/// become faster and asynchronous.
#[derive(Debug)]
pub struct Locked {
    #[cfg(feature = "cuda")]
    _locked: Option<crate::cuda::staging::Locked>,
}

impl Locked {
    /// Locks memory for copies to and from `device`, unless the system refuses; does nothing if `device` is
    /// the CPU.
    ///
    /// # Errors
    /// A tensor that is not on the host.
    pub fn new(t: &Real, device: &Device) -> Result<Self> {
        if !t.device().is_cpu() {
            candle_core::bail!("page-locked memory of a tensor that is not on the host: {:?}", t.shape());
        }
        let _ = device;
        Ok(Self {
            #[cfg(feature = "cuda")]
            _locked: if device.is_cuda() && t.elem_count() > 0 {
                crate::cuda::staging::Locked::new(t, device)?
            } else {
                None
            },
        })
    }
}

/// A tensor offloaded to the host between two uses on the device, or left in place.
#[derive(Debug)]
pub struct Offloaded {
    /// Pending copy in either direction; completes before any memory is freed.
    copy: PendingTransfer,
    here: Option<Tensor>,
    shape: candle_core::Shape,
    /// Host memory; `None` if the tensor stays in place.
    there: Option<Room>,
}

impl Offloaded {
    /// A tensor left in place.
    pub fn here(x: Tensor) -> Self {
        Self { copy: PendingTransfer::over(), shape: x.shape().clone(), here: Some(x), there: None }
    }

    /// Starts the copy to the host. Device memory stays allocated until [`Offloaded::release`].
    ///
    /// # Errors
    /// Errors of the driver; out of memory.
    pub fn offload(x: Tensor, pin: bool) -> Result<Self> {
        let flat = x.real()?.contiguous()?.flatten_all()?;
        let there = Room::take(&flat, pin)?;
        let copy = send(&flat, &there.vector)?;
        Ok(Self { copy, shape: x.shape().clone(), here: Some(flat.into()), there: Some(there) })
    }

    /// Frees the device memory once the copy is complete.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn release(&mut self) -> Result<()> {
        if self.there.is_some() {
            std::mem::take(&mut self.copy).wait()?;
            self.here = None;
        }
        Ok(())
    }

    /// Starts the copy back to the device.
    ///
    /// # Errors
    /// Errors of the driver; out of memory.
    pub fn prefetch(&mut self, device: &Device) -> Result<()> {
        if let (None, Some(there)) = (&self.here, &self.there) {
            let from = &there.vector;
            let to = Real::zeros(from.elem_count(), from.dtype(), device)?;
            self.copy = send(from, &to)?;
            self.here = Some(to.into());
        }
        Ok(())
    }

    /// Returns the tensor on the device.
    ///
    /// # Errors
    /// See [`Offloaded::prefetch`].
    pub fn take(mut self, device: &Device) -> Result<Tensor> {
        self.prefetch(device)?;
        std::mem::take(&mut self.copy).wait()?;
        match self.here.take() {
            Some(x) => x.reshape(self.shape),
            None => candle_core::bail!("a tensor that waits nowhere"),
        }
    }
}

/// Host memory for a device tensor. On CUDA it comes from a pool, because page-locking is slow.
#[derive(Debug)]
struct Room {
    vector: Real,
    #[cfg(feature = "cuda")]
    _lent: Option<crate::cuda::staging::Lent>,
}

impl Room {
    fn take(like: &Real, pin: bool) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if like.device().is_cuda() {
            let lent = crate::cuda::staging::Lent::take(like, pin)?;
            return Ok(Self { vector: lent.vector(like.elem_count())?, _lent: Some(lent) });
        }
        let _ = pin;
        Ok(Self {
            vector: Real::zeros(like.elem_count(), like.dtype(), &Device::Cpu)?,
            #[cfg(feature = "cuda")]
            _lent: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{randn, values};
    use candle_core::DType;

    /// An offloaded tensor keeps its values and uses no device memory in between.
    #[test]
    fn offloaded_tensors_keep_their_values() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            let x = randn(3, (5, 7), dtype)?;
            let want = values(&x);
            let mut p = Offloaded::offload(x, true)?;
            assert!(p.here.is_some());
            p.release()?;
            assert!(p.here.is_none());
            p.prefetch(&Device::Cpu)?;
            let back = p.take(&Device::Cpu)?;
            assert_eq!((back.dims(), values(&back)), ([5, 7].as_slice(), want.clone()));
            let mut stays = Offloaded::here(back);
            stays.release()?;
            assert_eq!(values(&stays.take(&Device::Cpu)?), want);
        }
        Ok(())
    }
}
