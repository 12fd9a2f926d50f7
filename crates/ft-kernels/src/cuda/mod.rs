//! CUDA devices: one stream each, memory from the driver's pool, and memory statistics. Also kernel
//! launches (`launch`) and accumulating products (`gemm`).
//!
//! Our own kernels are CUDA sources next to the operation's Rust code, compiled by build.rs.
//! `examples/gpu_check` compares them with the CPU versions on a GPU.

#[cfg(test)]
mod compiled_tests;
#[cfg(feature = "cuda")]
mod curand;
mod device;
#[cfg(feature = "cuda")]
pub mod gemm;
#[cfg(test)]
pub mod host_tests;
#[cfg(any(test, feature = "cuda"))]
#[path = "libraries/isa.rs"]
mod isa;
pub mod launch;
#[cfg(all(feature = "cuda", target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod libraries;
#[cfg(feature = "cuda")]
pub mod module;
#[cfg(feature = "cuda")]
pub mod nccl;
#[cfg(feature = "cuda")]
pub mod staging;
pub mod upload;

#[cfg(feature = "cuda")]
pub(crate) use libraries::cublas_lt;

/// Defines a table of C functions, `field: "symbol" as type;` each.
#[cfg(feature = "cuda")]
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($field:ident: $symbol:literal as $type:ty;)* }) => {
        $(#[$doc])*
        struct $table {
            $($field: $type,)*
        }

        impl $table {
            const SYMBOLS: [&str; [$($symbol),*].len()] = [$($symbol),*];

            /// # Safety
            /// The addresses are of functions with these symbols, in order, and these types.
            unsafe fn at([$($field),*]: [*mut std::ffi::c_void; Self::SYMBOLS.len()]) -> Self {
                // SAFETY: by contract.
                unsafe { Self { $($field: std::mem::transmute::<*mut std::ffi::c_void, $type>($field),)* } }
            }
        }
    };
}
#[cfg(feature = "cuda")]
pub(crate) use functions;

pub use device::{
    all_too_old, count, cuda_memory, device_bytes, driver_version, enter, name, nccl_is_here, open,
    pool_bytes, reserved_bytes, reset_peak, too_old,
};

/// On other platforms, the loader resolves the libraries at program start.
#[cfg(all(
    feature = "cuda",
    not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))
))]
mod libraries {
    pub fn load_driver() -> Result<(), String> {
        Ok(())
    }
    pub fn driver_version() -> Option<i32> {
        None
    }
    pub fn check_driver() -> Result<(), String> {
        Ok(())
    }
    pub fn load_cublas() -> Result<(), String> {
        Ok(())
    }
    pub fn cublas_lt<const N: usize>(_: [&str; N]) -> Result<[*mut std::ffi::c_void; N], String> {
        Err("8-bit products are for Linux".into())
    }
    pub fn nccl<const N: usize>(_: [&str; N]) -> Result<[*mut std::ffi::c_void; N], String> {
        Err("NCCL is for Linux".into())
    }
}
