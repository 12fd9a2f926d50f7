//! Memory of a device.

use candle_core::Device;

/// Peak bytes of the run's pool on CUDA, resident bytes of the process on the CPU.
pub fn device_bytes(device: &Device) -> u64 {
    match super::pool_bytes(device) {
        Some((_, high)) => high,
        None => ft_base::memory::host_bytes(),
    }
}

/// Free and total bytes of the current CUDA device, if there is one.
pub fn cuda_memory() -> Option<(u64, u64)> {
    #[cfg(feature = "cuda")]
    {
        let (free, total) = candle_core::cuda_backend::cudarc::driver::result::mem_get_info().ok()?;
        Some((free as u64, total as u64))
    }
    #[cfg(not(feature = "cuda"))]
    None
}
