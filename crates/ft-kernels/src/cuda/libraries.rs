//! Loads the NVIDIA libraries when a device is opened instead of at program start.
//!
//! candle links the driver, cuBLAS and the CUDA runtime, so a normal binary would not start without them,
//! not even for `ft check` or on the CPU. This module defines every library function used by the program
//! as a jump through an address, filled in by `load_driver` and `load_cublas`. Definitions in the program
//! take precedence over libraries, and the linker drops libraries without used symbols (as in `curand`).
//! Before loading, the functions return an error. The definitions are hidden from the libraries
//! (`.hidden`), which keep calling their own.
//!
//! The CUDA runtime is not loaded at all: only candle kernels unused by ft (GGUF) call it, and their
//! registration at program start becomes a no-op.

use candle_core::cuda_backend::cudarc::driver::sys;
use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

/// Major CUDA version of this build, and thus of cuBLAS.
const MAJOR: u32 = sys::CUDA_VERSION / 1000;

/// CUDA_ERROR_NOT_INITIALIZED; cuBLAS reads it as an allocation failure.
const NOT_LOADED: c_int = 3;
/// cudaErrorNotSupported.
const NOT_SUPPORTED: c_int = 801;

extern "C" fn not_loaded() -> c_int {
    NOT_LOADED
}

/// Address of one function.
type Address = AtomicPtr<c_void>;

/// Defines library functions as jumps, and a list of names and addresses.
macro_rules! jumps {
    ($list:ident: $($name:ident)*) => {
        $(
            #[allow(non_snake_case)]
            mod $name {
                pub static ADDRESS: super::Address =
                    super::Address::new(super::not_loaded as extern "C" fn() -> std::ffi::c_int as *mut _);

                /// # Safety
                /// As for the library function.
                #[unsafe(no_mangle)]
                #[unsafe(naked)]
                unsafe extern "C" fn $name() {
                    #[cfg(target_arch = "x86_64")]
                    std::arch::naked_asm!(
                        concat!(".hidden ", stringify!($name)), "jmp qword ptr [rip + {at}]", at = sym ADDRESS
                    );
                    #[cfg(target_arch = "aarch64")]
                    std::arch::naked_asm!(
                        concat!(".hidden ", stringify!($name)),
                        "adrp x16, {at}", "ldr x16, [x16, :lo12:{at}]", "br x16", at = sym ADDRESS
                    );
                }
            }
        )*
        const $list: &[(&str, &Address)] = &[$((stringify!($name), &$name::ADDRESS)),*];
    };
}

jumps! { DRIVER:
    cuCtxDestroy_v2 cuCtxGetCurrent cuCtxSetCurrent cuCtxSynchronize cuDeviceGet cuDeviceGetAttribute
    cuDeviceGetDefaultMemPool cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain cuEventCreate cuEventDestroy_v2
    cuEventElapsedTime_v2 cuEventQuery cuEventRecord cuEventSynchronize cuFuncSetAttribute cuGetErrorName
    cuGetErrorString cuInit cuLaunchKernel cuMemAllocAsync cuMemAlloc_v2 cuMemFreeAsync cuMemFreeHost cuMemFree_v2
    cuMemGetInfo_v2 cuMemHostAlloc cuMemHostRegister_v2 cuMemHostUnregister cuMemPoolGetAttribute
    cuMemPoolSetAttribute cuMemcpyDtoDAsync_v2
    cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2 cuMemcpyPeerAsync cuMemsetD8Async cuMemsetD32Async cuModuleGetFunction
    cuModuleLoad cuModuleLoadData cuModuleUnload cuStreamCreate cuStreamDestroy_v2 cuStreamIsCapturing
    cuStreamSynchronize cuStreamWaitEvent cuDeviceGetCount cuDeviceGetName cuDeviceTotalMem_v2
    cuDriverGetVersion
}

jumps! { CUBLAS:
    cublasCreate_v2 cublasDestroy_v2 cublasDgemmStridedBatched cublasGemmEx cublasGemmStridedBatchedEx
    cublasSetStream_v2
}

/// Defines no-op CUDA runtime functions returning `$result`.
macro_rules! nothing {
    ($result:expr => $t:ty: $($name:ident)*) => { $(
        std::arch::global_asm!(concat!(".hidden ", stringify!($name)));
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        extern "C" fn $name() -> $t {
            $result
        }
    )* };
}

nothing! { std::ptr::dangling_mut::<u64>().cast() => *mut c_void: __cudaRegisterFatBinary }
nothing! { () => ():
    __cudaRegisterFatBinaryEnd __cudaRegisterFunction __cudaRegisterVar __cudaUnregisterFatBinary
}
nothing! { c"not a part of ft".as_ptr() => *const std::ffi::c_char: cudaGetErrorName cudaGetErrorString }
nothing! { NOT_SUPPORTED => c_int:
    __cudaGetKernel __cudaLaunchKernel_ptsz __cudaPopCallConfiguration __cudaPushCallConfiguration
    cudaDeviceGetAttribute cudaFree cudaFreeAsync_ptsz cudaFuncGetAttributes cudaFuncSetAttribute cudaGetDevice
    cudaGetDeviceCount cudaGetLastError cudaMalloc cudaMallocAsync_ptsz cudaMemsetAsync_ptsz
    cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cudaPeekAtLastError cudaSetDevice
    cudaStreamSynchronize_ptsz
}

/// The loader's error message for a missing library.
fn reason() -> String {
    // SAFETY: dlerror returns null or a string valid until the thread's next call; the string is copied.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader does not say why".into();
    }
    // SAFETY: as above; the string is null-terminated.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Loads a library and resolves the addresses.
fn fill(library: &str, functions: &[(&str, &Address)]) -> Result<(), String> {
    let name = CString::new(library).map_err(|e| e.to_string())?;
    // SAFETY: loading runs the library's initializers, as at a normal program start.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        return Err(reason());
    }
    for (function, address) in functions {
        let symbol = CString::new(*function).map_err(|e| e.to_string())?;
        // SAFETY: the handle belongs to a library never unloaded.
        let at = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
        // functions missing in this library version fail when called
        if !at.is_null() {
            address.store(at, Ordering::Release);
        }
    }
    Ok(())
}

/// Loads the driver library. Repeated calls do nothing.
///
/// # Errors
/// The library is missing; the message includes a hint.
pub fn load_driver() -> Result<(), String> {
    static DONE: Mutex<bool> = Mutex::new(false);
    once(&DONE, || {
        fill("libcuda.so.1", DRIVER).map_err(|e| {
            format!(
                "no NVIDIA driver here: {e}\n\
                 hint: install NVIDIA's driver for CUDA {MAJOR} (nvidia-smi then lists the GPUs)"
            )
        })
    })
}

/// Checks the version of the loaded driver.
///
/// # Errors
/// The driver is older than the CUDA of this build; the message includes a hint.
pub fn check_driver() -> Result<(), String> {
    let mut version = 0;
    // SAFETY: the pointer points to a c_int.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    if asked.result().is_err() || version / 1000 >= MAJOR.cast_signed() {
        return Ok(());
    }
    Err(format!(
        "NVIDIA's driver here supports CUDA {}.{}, and this ft was built for CUDA {MAJOR}\n\
         hint: a driver for CUDA {MAJOR} or later (nvidia-smi shows the version it supports)",
        version / 1000,
        version % 1000 / 10
    ))
}

/// Loads cuBLAS. Repeated calls do nothing.
///
/// # Errors
/// The library is missing; the message includes a hint.
pub fn load_cublas() -> Result<(), String> {
    static DONE: Mutex<bool> = Mutex::new(false);
    once(&DONE, || {
        fill(&format!("libcublas.so.{MAJOR}"), CUBLAS).map_err(|e| {
            format!(
                "no cuBLAS here: {e}\n\
                 hint: pip install 'nvidia-cublas=={MAJOR}.*'\n\
                 hint: export LD_LIBRARY_PATH=$(python3 -c 'import sysconfig; \
                 print(sysconfig.get_path(\"purelib\"))')/nvidia/cu{MAJOR}/lib:$LD_LIBRARY_PATH"
            )
        })
    })
}

/// Loads NCCL and returns the addresses of the functions `names`, in order.
///
/// # Errors
/// The library is missing; the message includes a hint.
pub fn nccl<const N: usize>(names: [&str; N]) -> Result<[*mut c_void; N], String> {
    let mut all = [std::ptr::null_mut(); N];
    let mut load = || -> Result<(), String> {
        let library = c"libnccl.so.2";
        // SAFETY: loading runs the library's initializers, as at a normal program start.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(reason());
        }
        for (at, name) in all.iter_mut().zip(names) {
            let symbol = CString::new(name).map_err(|e| e.to_string())?;
            // SAFETY: the handle belongs to a library never unloaded.
            *at = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
            if at.is_null() {
                return Err(format!("libnccl.so.2 has no {name}"));
            }
        }
        Ok(())
    };
    load().map_err(|e| {
        format!(
            "several CUDA devices work together by NCCL, and it is not here: {e}\n\
             hint: pip install nvidia-nccl-cu{MAJOR}\n\
             hint: export LD_LIBRARY_PATH=$(python3 -c 'import sysconfig; \
             print(sysconfig.get_path(\"purelib\"))')/nvidia/nccl/lib:$LD_LIBRARY_PATH"
        )
    })?;
    Ok(all)
}

fn once(done: &Mutex<bool>, load: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
    if !*done {
        load()?;
        *done = true;
    }
    Ok(())
}
