//! Time stamps in the work of a device, for timing without synchronization.

use candle_core::{Device, Result};
use std::time::Instant;

/// A time stamp: clock time on the CPU, an event on CUDA.
#[derive(Debug)]
pub struct Moment(At);

#[derive(Debug)]
enum At {
    Clock(Instant),
    #[cfg(feature = "cuda")]
    Event(candle_core::cuda_backend::cudarc::driver::CudaEvent),
}

impl Moment {
    /// Records the time at which all work submitted to `device` so far is complete.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn now(device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(cuda) = device {
            use candle_core::cuda_backend::{WrapErr, cudarc::driver::sys::CUevent_flags};
            // cudarc disables timing of events by default
            let event = cuda.cuda_stream().record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w()?;
            return Ok(Self(At::Event(event)));
        }
        // CPU work is synchronous
        device.synchronize()?;
        Ok(Self(At::Clock(Instant::now())))
    }

    /// Seconds since an earlier moment of the same device; blocks until this moment has passed.
    ///
    /// # Errors
    /// Errors of the device; moments of different devices.
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
    fn moments_are_ordered_in_time() -> Result<()> {
        let first = Moment::now(&Device::Cpu)?;
        let second = Moment::now(&Device::Cpu)?;
        assert!(second.since(&first)? >= 0.0);
        assert_eq!(first.since(&second)?, 0.0);
        Ok(())
    }
}
