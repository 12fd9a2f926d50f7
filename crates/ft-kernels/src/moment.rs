//! Moments in the work of a device, to tell how long something took without waiting for it.

use candle_core::{Device, Result};
use std::time::Instant;

/// A moment: of the clock on the CPU; on CUDA an event, which passes when the work before it is done.
#[derive(Debug)]
pub struct Moment(At);

#[derive(Debug)]
enum At {
    Clock(Instant),
    #[cfg(feature = "cuda")]
    Event(candle_core::cuda_backend::cudarc::driver::CudaEvent),
}

impl Moment {
    /// The moment when all that was asked of `device` so far is done.
    ///
    /// # Errors
    /// Of the device.
    pub fn now(device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Ok(cuda) = device.as_cuda_device() {
            use candle_core::cuda_backend::{WrapErr, cudarc::driver::sys::CUevent_flags};
            // by default cudarc's events have no time
            let event = cuda.cuda_stream().record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w()?;
            return Ok(Self(At::Event(event)));
        }
        // what is not CUDA is done when it comes back
        device.synchronize()?;
        Ok(Self(At::Clock(Instant::now())))
    }

    /// Seconds from an earlier moment of the same device to this one; waits until it has passed.
    ///
    /// # Errors
    /// Of the device; moments of two of them.
    pub fn since(&self, earlier: &Self) -> Result<f64> {
        match (&earlier.0, &self.0) {
            (At::Clock(a), At::Clock(b)) => Ok(b.duration_since(*a).as_secs_f64()),
            #[cfg(feature = "cuda")]
            (At::Event(a), At::Event(b)) => {
                use candle_core::cuda_backend::WrapErr;
                Ok(f64::from(a.elapsed_ms(b).w()?) / 1e3)
            }
            #[cfg(feature = "cuda")]
            _ => candle_core::bail!("moments of two devices"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_moments_are_later() -> Result<()> {
        let first = Moment::now(&Device::Cpu)?;
        let second = Moment::now(&Device::Cpu)?;
        assert!(second.since(&first)? >= 0.0);
        assert_eq!(first.since(&second)?, 0.0);
        Ok(())
    }
}
