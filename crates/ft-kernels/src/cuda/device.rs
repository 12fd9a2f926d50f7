//! CUDA devices: opening, memory pool, memory statistics.

#![cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "without CUDA, no device is asked"))]

#[cfg(feature = "cuda")]
use super::{libraries, nccl};
use candle_core::Device;
#[cfg(feature = "cuda")]
use ft_base::device_error;

/// Oldest compute capability with code in ft, as major and minor: same as in build.rs.
const OLDEST: (i32, i32) = (8, 0);

/// Why ft does not run on a card of this compute capability; `None` if it does.
pub fn too_old(card: &str, (major, minor): (i32, i32)) -> Option<String> {
    let (oldest, and) = OLDEST;
    ((major, minor) < OLDEST).then(|| {
        format!(
            "{card} has compute capability {major}.{minor}, and ft needs {oldest}.{and} or later (A100, RTX 3090 and \
             later)"
        )
    })
}

/// Why ft runs on no CUDA device of this machine: all are [`too_old`], and this is the first. `None` without a device.
pub fn all_too_old() -> Option<String> {
    #[cfg(feature = "cuda")]
    {
        let why: Option<Vec<String>> = (0..count()).map(refuses).collect();
        why?.into_iter().next()
    }
    #[cfg(not(feature = "cuda"))]
    None
}

/// Why ft does not run on a device, which is not opened for it: see [`too_old`].
#[cfg(feature = "cuda")]
fn refuses(ordinal: usize) -> Option<String> {
    use candle_core::cuda_backend::cudarc::driver::{result, sys::CUdevice_attribute as Attribute};
    result::init().ok()?;
    let device = result::device::get(i32::try_from(ordinal).ok()?).ok()?;
    // SAFETY: the driver has returned this device.
    let of = |what| unsafe { result::device::get_attribute(device, what) }.ok();
    let major = of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let name = result::device::get_name(device).unwrap_or_default();
    too_old(&format!("CUDA device {ordinal} ({name})"), (major, minor))
}

/// Opens a CUDA device.
///
/// Configures the driver's memory pool to keep freed memory. With the default threshold of 0, every
/// synchronization would return free memory to the system, and the next step would allocate it again.
///
/// A single stream executes all work in order, so tensors need no events to track reads and frees: with
/// events, an elementwise operation takes 14 driver calls instead of 4.
///
/// # Errors
/// Why no device is usable: a card that is [`too_old`], a missing library with the command to install it.
pub fn open(ordinal: usize) -> Result<Device, String> {
    #[cfg(feature = "cuda")]
    {
        libraries::load_driver()?;
        libraries::check_driver()?;
        if let Some(why) = refuses(ordinal) {
            return Err(why);
        }
        libraries::load_cublas()?;
        let label = format!("CUDA device {ordinal}");
        device_error::opened(&label);
        let device =
            Device::new_cuda_with_stream(ordinal).map_err(|e| format!("no usable CUDA device: {e}"))?;
        let cuda = device.as_cuda_device().map_err(|e| e.to_string())?;
        if let Ok(name) = cuda.cuda_stream().context().name() {
            device_error::opened(&format!("{label} ({name})"));
        }
        // SAFETY: tensors of this device are created, used and freed on its only compute stream; copies on
        // other streams synchronize with explicit events.
        unsafe { cuda.disable_event_tracking() };
        pool::keep(&device)?;
        Ok(device)
    }
    #[cfg(not(feature = "cuda"))]
    Err("this ft was built without CUDA (cargo build --release --features cuda)".into())
}

/// Model of a CUDA device as its driver names it, such as `NVIDIA H100 80GB HBM3`.
pub fn name(device: &Device) -> Option<String> {
    #[cfg(feature = "cuda")]
    {
        device.as_cuda_device().ok()?.cuda_stream().context().name().ok()
    }
    #[cfg(not(feature = "cuda"))]
    None
}

/// CUDA version of the driver, such as 12040 for 12.4; `None` without a driver, or if it does not say.
pub fn driver_version() -> Option<i32> {
    #[cfg(feature = "cuda")]
    {
        libraries::load_driver().ok().and_then(|()| libraries::driver_version())
    }
    #[cfg(not(feature = "cuda"))]
    None
}

/// Makes a device current on this thread, as every device operation does. No-op for the CPU.
///
/// # Errors
/// The driver fails.
pub fn enter(device: &Device) -> candle_core::Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        use candle_core::cuda_backend::WrapErr;
        cuda.cuda_stream().context().bind_to_thread().w()?;
    }
    Ok(())
}

/// Number of CUDA devices; 0 without a driver.
pub fn count() -> usize {
    #[cfg(feature = "cuda")]
    {
        use candle_core::cuda_backend::cudarc::driver::CudaContext;
        let devices = libraries::load_driver().ok().and_then(|()| CudaContext::device_count().ok());
        devices.and_then(|n| usize::try_from(n).ok()).unwrap_or(0)
    }
    #[cfg(not(feature = "cuda"))]
    0
}

/// Checks that NCCL is available, as required for multiple devices.
///
/// # Errors
/// NCCL is missing; the message includes a hint.
pub fn nccl_is_here() -> Result<(), String> {
    #[cfg(feature = "cuda")]
    {
        nccl::load()
    }
    #[cfg(not(feature = "cuda"))]
    open(0).map(drop)
}

/// Current and peak bytes in use in the memory pool; `None` for other devices.
pub fn pool_bytes(device: &Device) -> Option<(u64, u64)> {
    #[cfg(feature = "cuda")]
    {
        pool::used(device)
    }
    #[cfg(not(feature = "cuda"))]
    None
}

/// Restarts the peak of [`pool_bytes`] at the bytes in use once the device has done its work; nothing on the CPU.
pub fn reset_peak(device: &Device) {
    #[cfg(feature = "cuda")]
    let _ = device.synchronize().map(|()| pool::reset(device));
}

/// Most bytes that the memory pool has taken from the device, in use or kept for reuse; `None` for other devices.
pub fn reserved_bytes(device: &Device) -> Option<u64> {
    #[cfg(feature = "cuda")]
    {
        pool::reserved(device)
    }
    #[cfg(not(feature = "cuda"))]
    None
}

/// Peak bytes of the run's pool on CUDA, resident bytes of the process on the CPU.
pub fn device_bytes(device: &Device) -> u64 {
    match pool_bytes(device) {
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

#[cfg(feature = "cuda")]
mod pool {
    use candle_core::Device;
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    use std::ffi::c_void;

    fn handle(device: &Device) -> Result<sys::CUmemoryPool, String> {
        let Device::Cuda(cuda) = device else { return Err("not a CUDA device".into()) };
        let ordinal = cuda.cuda_stream().context().cu_device();
        // SAFETY: candle opened the device, so the context is alive.
        unsafe { result::device::get_default_mem_pool(ordinal) }.map_err(|e| format!("memory pool: {e}"))
    }

    fn write(device: &Device, at: sys::CUmemPool_attribute, mut value: u64) -> Result<(), String> {
        // SAFETY: the attribute is a u64, and the pointer points to one.
        unsafe { result::mem_pool::set_attribute(handle(device)?, at, (&raw mut value).cast::<c_void>()) }
            .map_err(|e| format!("memory pool: {e}"))
    }

    pub fn keep(device: &Device) -> Result<(), String> {
        write(device, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)
    }

    pub fn reset(device: &Device) -> Result<(), String> {
        write(device, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)
    }

    fn read(device: &Device, at: sys::CUmemPool_attribute) -> Option<u64> {
        let (pool, mut bytes) = (handle(device).ok()?, 0u64);
        // SAFETY: the attribute is a u64, and the pointer points to one.
        unsafe { result::mem_pool::get_attribute(pool, at, (&raw mut bytes).cast::<c_void>()) }.ok()?;
        Some(bytes)
    }

    pub fn used(device: &Device) -> Option<(u64, u64)> {
        Some((
            read(device, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            read(device, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        ))
    }

    pub fn reserved(device: &Device) -> Option<u64> {
        read(device, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
    }
}

#[cfg(test)]
mod tests {
    use super::too_old;

    #[test]
    fn cards_before_the_oldest_are_refused() {
        let why = too_old("Tesla T4", (7, 5)).unwrap_or_default();
        assert!(why.starts_with("Tesla T4 has compute capability 7.5, and ft needs 8.0 or later"), "{why}");
        assert_eq!([(8, 0), (8, 9), (12, 1)].map(|c| too_old("", c)), [None, None, None]);
    }
}
