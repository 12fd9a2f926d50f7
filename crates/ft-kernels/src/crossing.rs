//! Values that cross between the host and a device, or between devices, beside a device's computing.
//!
//! On CUDA a copy goes by a stream of its own each way (`cuda::staging`), what ranks give one another by another one
//! (`cuda::nccl`), and what the device computes afterwards waits for it where that was asked for. On the CPU, which is host
//! and device, a copy is made at once.

use super::tensor::{Real, Tensor};
use candle_core::{Device, Result};

/// A copy that was begun. What the device is asked to compute once it was waited for sees what came, and may overwrite
/// where it came from.
#[derive(Debug, Default)]
pub struct Arrival {
    #[cfg(feature = "cuda")]
    way: Option<Way>,
}

/// How it comes.
#[cfg(feature = "cuda")]
#[derive(Debug)]
enum Way {
    Copy(super::cuda::staging::Crossing),
    /// From other ranks: what it waits for and tensors that stay meanwhile, and what is then added to what.
    Flight {
        flight: super::cuda::nccl::Flight,
        _stay: Stays,
        sum: Option<(super::sum::Parts, Tensor)>,
    },
}

/// What stays until what goes between devices is over.
#[cfg(feature = "cuda")]
type Stays = (Vec<Tensor>, Option<Box<Arrival>>);

#[cfg(feature = "cuda")]
impl Way {
    fn wait(&self) -> Result<()> {
        match self {
            Way::Copy(copy) => copy.wait(),
            Way::Flight { flight, .. } => flight.wait(),
        }
    }
}

impl Arrival {
    /// Of what is there.
    pub fn over() -> Self {
        Self::default()
    }

    /// Of what comes from other ranks, for which tensors stay, and which waits for `before`; what is to be added is, once it
    /// was waited for.
    #[cfg(feature = "cuda")]
    pub fn of(
        flight: super::cuda::nccl::Flight,
        stay: Vec<Tensor>,
        before: Option<Self>,
        sum: Option<(super::sum::Parts, Tensor)>,
    ) -> Self {
        Self { way: Some(Way::Flight { flight, _stay: (stay, before.map(Box::new)), sum }) }
    }

    /// When a copy is done.
    #[cfg(feature = "cuda")]
    pub fn event(&self) -> Option<&candle_core::cuda_backend::cudarc::driver::CudaEvent> {
        match &self.way {
            Some(Way::Copy(copy)) => Some(copy.event()),
            _ => None,
        }
    }

    /// Lets the device wait for it; the host does not.
    ///
    /// # Errors
    /// Of the driver.
    #[cfg_attr(not(feature = "cuda"), allow(unused_mut))]
    pub fn wait(mut self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(way) = self.way.take() {
            way.wait()?;
            if let Way::Flight { sum: Some((parts, to)), .. } = &way {
                parts.add_to(to)?;
            }
        }
        Ok(())
    }
}

/// Nobody uses memory that a copy still reads or writes.
#[cfg(feature = "cuda")]
impl Drop for Arrival {
    fn drop(&mut self) {
        // where the driver has failed, the next call says so
        let _ = self.way.as_ref().map(Way::wait);
    }
}

/// Begins to copy a vector from the host into one of a device. The host's stays as it is until what came was used.
///
/// # Errors
/// Of the driver; vectors of different kinds.
pub fn send(from: &Real, to: &Real) -> Result<Arrival> {
    cross(from, to)
}

/// Begins to copy between vectors of which one is on the host.
fn cross(from: &Real, to: &Real) -> Result<Arrival> {
    #[cfg(feature = "cuda")]
    if let Some(copy) = super::cuda::staging::copy(from, to)? {
        return Ok(Arrival { way: Some(Way::Copy(copy)) });
    }
    if to.elem_count() > 0 {
        to.slice_set(from, 0, 0)?;
    }
    Ok(Arrival::over())
}

/// Page-locks the memory of a tensor on the host while it lives: copies from and to a device are faster, and nobody waits
/// for them.
#[derive(Debug)]
pub struct Locked {
    #[cfg(feature = "cuda")]
    _locked: Option<super::cuda::staging::Locked>,
}

impl Locked {
    /// Of a tensor whose values cross to and from `device`; nothing to do where that is the host.
    ///
    /// # Errors
    /// Memory that the system does not lock.
    pub fn new(t: &Real, device: &Device) -> Result<Self> {
        if !t.device().is_cpu() {
            candle_core::bail!("page-locked memory of a tensor that is not on the host: {:?}", t.shape());
        }
        let _ = device;
        Ok(Self {
            #[cfg(feature = "cuda")]
            _locked: match device.is_cuda() && t.elem_count() > 0 {
                true => Some(super::cuda::staging::Locked::new(t, device)?),
                false => None,
            },
        })
    }
}

/// A tensor that waits on the host from one use on the device to the next, or stays where it is.
#[derive(Debug)]
pub struct Parked {
    /// What is on its way, there or back: waited for before any memory goes.
    copy: Arrival,
    here: Option<Tensor>,
    shape: candle_core::Shape,
    /// Where it waits; none where it stays.
    there: Option<Room>,
}

impl Parked {
    /// One that stays.
    pub fn here(x: Tensor) -> Self {
        Self { copy: Arrival::over(), shape: x.shape().clone(), here: Some(x), there: None }
    }

    /// Begins to bring one to the host; it takes memory of the device until it is [gone](Parked::gone).
    ///
    /// # Errors
    /// Of the driver; no memory.
    pub fn leave(x: Tensor, pin: bool) -> Result<Self> {
        let flat = x.real()?.contiguous()?.flatten_all()?;
        let there = Room::take(&flat, pin)?;
        let copy = cross(&flat, there.vector())?;
        Ok(Self { copy, shape: x.shape().clone(), here: Some(flat.into()), there: Some(there) })
    }

    /// Gives the device's memory back.
    ///
    /// # Errors
    /// Of the driver.
    pub fn gone(&mut self) -> Result<()> {
        if self.there.is_some() {
            std::mem::replace(&mut self.copy, Arrival::over()).wait()?;
            self.here = None;
        }
        Ok(())
    }

    /// Begins to bring it back.
    ///
    /// # Errors
    /// Of the driver; no memory.
    pub fn come(&mut self, device: &Device) -> Result<()> {
        if let (None, Some(there)) = (&self.here, &self.there) {
            let from = there.vector();
            let to = Real::zeros(from.elem_count(), from.dtype(), device)?;
            self.copy = cross(from, &to)?;
            self.here = Some(to.into());
        }
        Ok(())
    }

    /// The tensor, for what is computed next.
    ///
    /// # Errors
    /// As [`Parked::come`].
    pub fn take(mut self, device: &Device) -> Result<Tensor> {
        self.come(device)?;
        std::mem::replace(&mut self.copy, Arrival::over()).wait()?;
        match self.here.take() {
            Some(x) => x.reshape(self.shape),
            None => candle_core::bail!("a tensor that waits nowhere"),
        }
    }
}

/// Memory of the host for a tensor of a device. On CUDA it is taken and given back over and over: to lock it takes long.
#[derive(Debug)]
struct Room {
    vector: Real,
    #[cfg(feature = "cuda")]
    _lent: Option<super::cuda::staging::Lent>,
}

impl Room {
    fn take(like: &Real, pin: bool) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if like.device().is_cuda() {
            let lent = super::cuda::staging::Lent::take(like, pin)?;
            return Ok(Self { vector: lent.vector(like.elem_count())?, _lent: Some(lent) });
        }
        let _ = pin;
        Ok(Self {
            vector: Real::zeros(like.elem_count(), like.dtype(), &Device::Cpu)?,
            #[cfg(feature = "cuda")]
            _lent: None,
        })
    }

    fn vector(&self) -> &Real {
        &self.vector
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{randn, values};
    use candle_core::DType;

    /// What waits on the host comes back as it was, and takes none of the device's memory meanwhile.
    #[test]
    fn what_is_parked_comes_back() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            let x = randn(3, (5, 7), dtype)?;
            let want = values(&x);
            let mut p = Parked::leave(x, true)?;
            assert!(p.here.is_some());
            p.gone()?;
            assert!(p.here.is_none());
            p.come(&Device::Cpu)?;
            let back = p.take(&Device::Cpu)?;
            assert_eq!((back.dims(), values(&back)), ([5, 7].as_slice(), want.clone()));
            let mut stays = Parked::here(back);
            stays.gone()?;
            assert_eq!(values(&stays.take(&Device::Cpu)?), want);
        }
        Ok(())
    }
}
