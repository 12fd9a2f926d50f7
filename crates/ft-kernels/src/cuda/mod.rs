//! CUDA devices: opened with a stream of their own, memory kept by the driver's pool, and how much of it is used.
//! What kernels share there: launches (`launch`) and products that accumulate (`gemm`).
//!
//! Kernels of our own are CUDA sources beside their operation, compiled by build.rs. **None has run on a GPU yet**;
//! `examples/gpu_check` compares each with its CPU version where there is one.

#[cfg(test)]
mod compiled_tests;
#[cfg(feature = "cuda")]
mod curand;
#[cfg(feature = "cuda")]
pub mod gemm;
#[cfg(test)]
pub mod host_tests;
pub mod launch;
mod memory;
#[cfg(all(feature = "cuda", target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod libraries;
#[cfg(feature = "cuda")]
pub mod module;
#[cfg(feature = "cuda")]
pub mod nccl;
#[cfg(feature = "cuda")]
pub mod staging;
pub mod upload;

pub use memory::{cuda_memory, device_bytes};

use candle_core::Device;

/// Elsewhere the loader finds them when the program starts.
#[cfg(all(
    feature = "cuda",
    not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))
))]
mod libraries {
    pub fn load_driver() -> Result<(), String> {
        Ok(())
    }
    pub fn load_cublas() -> Result<(), String> {
        Ok(())
    }
    pub fn nccl<const N: usize>(_: [&str; N]) -> Result<[*mut std::ffi::c_void; N], String> {
        Err("NCCL is for Linux".into())
    }
}

/// Opens a CUDA device.
///
/// The driver's memory pool keeps what is freed: with its default threshold of 0 every wait for the device
/// would give all free memory back to the system and the next step would ask for it again.
///
/// All work goes to one stream, in the order in which it is asked for, so that no tensor needs events that say when it may
/// be read or freed: with them an operation by element is 14 calls of the driver instead of 4.
///
/// # Errors
/// Why there is no usable device, in words: a library that is missing is named, with the command that installs it.
#[cfg(feature = "cuda")]
pub fn open(ordinal: usize) -> Result<Device, String> {
    libraries::load_driver()?;
    libraries::load_cublas()?;
    let device = Device::new_cuda_with_stream(ordinal).map_err(|e| format!("no usable CUDA device: {e}"))?;
    let cuda = device.as_cuda_device().map_err(|e| e.to_string())?;
    // SAFETY: tensors of this device are made, used and freed on its one stream alone. What copies on another one
    // orders the two by events of its own.
    unsafe { cuda.disable_event_tracking() };
    pool::keep(&device)?;
    Ok(device)
}

/// Makes a device the one in use on this thread, as every operation on it does; the CPU always is.
///
/// # Errors
/// What the driver says.
#[cfg(feature = "cuda")]
pub fn enter(device: &Device) -> candle_core::Result<()> {
    use candle_core::cuda_backend::WrapErr;
    match device {
        Device::Cuda(cuda) => cuda.cuda_stream().context().bind_to_thread().w(),
        _ => Ok(()),
    }
}

/// Makes a device the one in use on this thread: this build has the CPU alone.
///
/// # Errors
/// Never.
#[cfg(not(feature = "cuda"))]
pub fn enter(_device: &Device) -> candle_core::Result<()> {
    Ok(())
}

/// How many CUDA devices there are: none without a driver.
#[cfg(feature = "cuda")]
pub fn count() -> usize {
    use candle_core::cuda_backend::cudarc::driver::CudaContext;
    let devices = libraries::load_driver().ok().and_then(|()| CudaContext::device_count().ok());
    devices.and_then(|n| usize::try_from(n).ok()).unwrap_or(0)
}

/// How many CUDA devices there are: to this build none.
#[cfg(not(feature = "cuda"))]
pub fn count() -> usize {
    0
}

/// Opens a CUDA device: this build has none.
///
/// # Errors
/// Always.
#[cfg(not(feature = "cuda"))]
pub fn open(_ordinal: usize) -> Result<Device, String> {
    Err("this ft was built without CUDA (cargo build --release --features cuda)".into())
}

/// Whether several devices can work together.
///
/// # Errors
/// NCCL is not there, with what to do.
#[cfg(feature = "cuda")]
pub fn nccl_is_here() -> Result<(), String> {
    nccl::load()
}

/// Whether several devices can work together: this build has none.
///
/// # Errors
/// Always.
#[cfg(not(feature = "cuda"))]
pub fn nccl_is_here() -> Result<(), String> {
    open(0).map(drop)
}

/// Bytes of the pool that are in use, and the most that ever were; `None` for other devices.
#[cfg(feature = "cuda")]
pub fn pool_bytes(device: &Device) -> Option<(u64, u64)> {
    pool::used(device)
}

/// Bytes of the pool that are in use: this build has none.
#[cfg(not(feature = "cuda"))]
pub fn pool_bytes(_device: &Device) -> Option<(u64, u64)> {
    None
}

#[cfg(feature = "cuda")]
mod pool {
    use candle_core::Device;
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    use std::ffi::c_void;

    fn handle(device: &Device) -> Result<sys::CUmemoryPool, String> {
        let cuda = device.as_cuda_device().map_err(|e| e.to_string())?;
        let ordinal = cuda.cuda_stream().context().cu_device();
        // SAFETY: the device is one that candle opened, so its context is alive.
        unsafe { result::device::get_default_mem_pool(ordinal) }.map_err(|e| format!("memory pool: {e}"))
    }

    pub fn keep(device: &Device) -> Result<(), String> {
        let mut threshold = u64::MAX;
        let at = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the attribute is a 64-bit number, and the pointer is to one.
        unsafe { result::mem_pool::set_attribute(handle(device)?, at, (&raw mut threshold).cast::<c_void>()) }
            .map_err(|e| format!("memory pool: {e}"))
    }

    pub fn used(device: &Device) -> Option<(u64, u64)> {
        let pool = handle(device).ok()?;
        let read = |at| {
            let mut bytes = 0u64;
            // SAFETY: the attribute is a 64-bit number, and the pointer is to one.
            unsafe { result::mem_pool::get_attribute(pool, at, (&raw mut bytes).cast::<c_void>()) }.ok()?;
            Some(bytes)
        };
        Some((
            read(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            read(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        ))
    }
}
