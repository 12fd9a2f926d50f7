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
//!
//! One binary serves drivers of CUDA 12.4 to 13, with the cuBLAS of the driver's version: the functions above are the
//! same in both but for those in `OLDER`.

mod wheels;

use super::isa;
use candle_core::cuda_backend::cudarc::driver::sys;
use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

/// Oldest CUDA version of a driver that runs this program: it compiles the PTX (`isa`).
const OLDEST: c_int = 12_040;
/// Newest major version of CUDA whose cuBLAS is looked for.
const NEWEST: c_int = 13;

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
    cuModuleLoad cuModuleUnload cuStreamCreate cuStreamDestroy_v2 cuStreamIsCapturing
    cuStreamSynchronize cuStreamWaitEvent cuDeviceGetCount cuDeviceGetName cuDeviceTotalMem_v2
    cuDriverGetVersion
}

/// Functions that drivers before CUDA 12.8 have under another name, with the same arguments.
const OLDER: &[(&str, &str)] = &[("cuEventElapsedTime_v2", "cuEventElapsedTime")];

/// The driver's `cuModuleLoadData`.
static MODULE_LOAD: Address = Address::new(not_loaded as extern "C" fn() -> c_int as *mut _);
const MODULES: &[(&str, &Address)] = &[("cuModuleLoadData", &MODULE_LOAD)];

std::arch::global_asm!(".hidden cuModuleLoadData");

/// Loads machine code, or PTX with its version lowered: candle's kernels are PTX of the version of the nvcc that
/// compiled them, and older drivers refuse it.
///
/// # Safety
/// As for the driver's function.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
unsafe extern "C" fn cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void) -> c_int {
    type Load = unsafe extern "C" fn(*mut sys::CUmodule, *const c_void) -> c_int;
    // SAFETY: the address is the driver's function, or `not_loaded`, which ignores arguments.
    let load = unsafe { std::mem::transmute::<*mut c_void, Load>(MODULE_LOAD.load(Ordering::Acquire)) };
    // SAFETY: an image is not empty. Its first byte is 0x7f for a cubin, 0x50 for a fat binary; text begins with a
    // comment and ends with a null.
    let ptx = unsafe { (image.cast::<u8>().read() == b'/').then(|| CStr::from_ptr(image.cast())) };
    let lowered = ptx.and_then(|p| p.to_str().ok()).and_then(|p| CString::new(isa::lowered(p)).ok());
    // SAFETY: the caller's module; the text is alive during the call.
    unsafe { load(module, lowered.as_ref().map_or(image, |text| text.as_ptr().cast())) }
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

/// A library by name or path; never unloaded.
fn library(name: &Path, flags: c_int) -> Result<*mut c_void, String> {
    let name = CString::new(name.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
    // SAFETY: loading runs the library's initializers, as at a normal program start.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | flags) };
    if handle.is_null() { Err(reason()) } else { Ok(handle) }
}

/// The library `name` from the loader's folders, else from the folder `inside` of NVIDIA's wheels, with the library
/// `before` that it needs.
fn find(name: &str, flags: c_int, inside: &str, before: Option<&str>) -> Result<*mut c_void, String> {
    library(Path::new(name), flags).or_else(|why| {
        let from = |folder: std::path::PathBuf| {
            let needed = before.map(|b| library(&folder.join(b), libc::RTLD_GLOBAL)).transpose();
            needed.and_then(|_| library(&folder.join(name), flags)).ok()
        };
        wheels::folders(inside).into_iter().find_map(from).ok_or(why)
    })
}

/// The address of a function; null if the library has none of this name.
fn address(handle: *mut c_void, function: &str) -> *mut c_void {
    match CString::new(function) {
        // SAFETY: the handle belongs to a library never unloaded.
        Ok(symbol) => unsafe { libc::dlsym(handle, symbol.as_ptr()) },
        Err(_) => std::ptr::null_mut(),
    }
}

/// The addresses of the functions `names` of a library, in order.
fn addresses<const N: usize>(
    handle: *mut c_void,
    library: &str,
    names: [&str; N],
) -> Result<[*mut c_void; N], String> {
    let all = names.map(|name| address(handle, name));
    let missing = names.iter().zip(all).find(|(_, at)| at.is_null());
    missing.map_or(Ok(all), |(f, _)| Err(format!("{library} has no {f}")))
}

/// Resolves addresses, also under older names.
fn fill(handle: *mut c_void, functions: &[(&str, &Address)], older: &[(&str, &str)]) {
    for (function, place) in functions {
        let others = older.iter().filter(|(new, _)| new == function).map(|(_, old)| *old);
        let mut found = [*function].into_iter().chain(others).map(|name| address(handle, name));
        // functions missing in this library version fail when called
        if let Some(at) = found.find(|at| !at.is_null()) {
            place.store(at, Ordering::Release);
        }
    }
}

/// Loads the driver library. Repeated calls do nothing.
///
/// # Errors
/// The library is missing; the message includes a hint.
pub fn load_driver() -> Result<(), String> {
    static DONE: Mutex<bool> = Mutex::new(false);
    once(&DONE, || {
        let handle = library(Path::new("libcuda.so.1"), libc::RTLD_GLOBAL).map_err(|e| {
            format!(
                "no NVIDIA driver here: {e}\n\
                 hint: install NVIDIA's driver 550 or later (nvidia-smi then lists the GPUs)"
            )
        })?;
        fill(handle, DRIVER, OLDER);
        fill(handle, MODULES, &[]);
        Ok(())
    })
}

/// CUDA version of the loaded driver, such as 12040 for 12.4; `None` if it does not say.
pub fn driver_version() -> Option<c_int> {
    let mut version = 0;
    // SAFETY: the pointer points to a c_int.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    asked.result().is_ok().then_some(version)
}

/// Major CUDA version of libraries for the loaded driver.
fn major() -> c_int {
    driver_version().map_or(NEWEST, |v| (v / 1000).min(NEWEST))
}

/// Checks the version of the loaded driver.
///
/// # Errors
/// The driver is too old; the message includes a hint.
pub fn check_driver() -> Result<(), String> {
    let words = |v: c_int| format!("{}.{}", v / 1000, v % 1000 / 10);
    match driver_version() {
        Some(version) if version < OLDEST => Err(format!(
            "NVIDIA's driver here supports CUDA {}, and ft needs {} or later\n\
             hint: NVIDIA's driver 550 or later (nvidia-smi shows its version and that of CUDA)",
            words(version),
            words(OLDEST)
        )),
        _ => Ok(()),
    }
}

/// A library of cuBLAS and its file name, with the library `before` that it needs: of the driver's version of CUDA, or
/// of an older one, which newer drivers support.
fn of_cublas(name: &str, flags: c_int, before: Option<&str>) -> Result<(*mut c_void, String), String> {
    let mut first = None;
    for version in (OLDEST / 1000..=major()).rev() {
        let inside: String = if version == 12 { "cublas/lib".into() } else { format!("cu{version}/lib") };
        let file = |name: &str| format!("lib{name}.so.{version}");
        match find(&file(name), flags, &inside, before.map(file).as_deref()) {
            Ok(handle) => return Ok((handle, file(name))),
            Err(why) => first = first.or(Some(why)),
        }
    }
    Err(first.unwrap_or_default())
}

/// Loads cuBLAS. Repeated calls do nothing.
///
/// # Errors
/// The library is missing; the message includes a hint.
pub fn load_cublas() -> Result<(), String> {
    static DONE: Mutex<bool> = Mutex::new(false);
    once(&DONE, || {
        let (handle, _) = of_cublas("cublas", libc::RTLD_GLOBAL, Some("cublasLt")).map_err(|why| {
            let package = match major() {
                12 => "nvidia-cublas-cu12".to_string(),
                version => format!("'nvidia-cublas=={version}.*'"),
            };
            format!("no cuBLAS here: {why}\n{}", install(&package))
        })?;
        fill(handle, CUBLAS, &[]);
        Ok(())
    })
}

/// Returns the addresses of the functions `names` of cuBLASLt, in order: of the version of cuBLAS, which needs it and
/// is loaded first.
///
/// # Errors
/// The library or a function is missing; the message includes a hint.
pub fn cublas_lt<const N: usize>(names: [&str; N]) -> Result<[*mut c_void; N], String> {
    load_cublas()?;
    let (handle, name) = of_cublas("cublasLt", libc::RTLD_LOCAL, None)
        .map_err(|why| format!("no cuBLASLt here: {why}\nhint: it comes with cuBLAS"))?;
    addresses(handle, &name, names)
}

/// Hints for a missing library of NVIDIA's wheels.
fn install(package: &str) -> String {
    format!(
        "hint: pip install {package} (found in the active Python environment, and in that of ft)\n\
         hint: or name the folder of the library in LD_LIBRARY_PATH"
    )
}

/// Loads NCCL and returns the addresses of the functions `names`, in order.
///
/// # Errors
/// The library is missing; the message includes a hint.
pub fn nccl<const N: usize>(names: [&str; N]) -> Result<[*mut c_void; N], String> {
    let name = "libnccl.so.2";
    let found = find(name, libc::RTLD_LOCAL, "nccl/lib", None);
    found.and_then(|handle| addresses(handle, name, names)).map_err(|e| {
        let install = install(&format!("nvidia-nccl-cu{}", major()));
        format!("several CUDA devices work together by NCCL, and it is not here: {e}\n{install}")
    })
}

fn once(done: &Mutex<bool>, load: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
    if !*done {
        load()?;
        *done = true;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Drivers before CUDA 12.8 lack the newer names.
    #[test]
    fn a_function_is_found_under_its_older_name() {
        let handle = library(Path::new("libc.so.6"), libc::RTLD_LOCAL).expect("the C library");
        let [newer, none] = [const { Address::new(std::ptr::null_mut()) }; 2];
        fill(handle, &[("ft_abs_v2", &newer), ("ft_none_v2", &none)], &[("ft_abs_v2", "abs")]);
        assert_eq!(newer.load(Ordering::Acquire), address(handle, "abs"));
        assert!(!newer.load(Ordering::Acquire).is_null() && none.load(Ordering::Acquire).is_null());
        for (new, _) in OLDER {
            assert!(DRIVER.iter().any(|(name, _)| name == new), "{new}");
        }
    }

    #[test]
    fn ptx_is_lowered_to_the_oldest_driver_s_version() {
        let ptx = |version| format!("//\n// by nvcc\n//\n\n.version {version}\n.target sm_80\n");
        for (is, becomes) in [("9.0", "8.4"), ("8.10", "8.4"), ("8.4", "8.4"), ("7.8", "7.8")] {
            assert_eq!(isa::lowered(&ptx(is)), ptx(becomes));
        }
        assert_eq!(isa::lowered("no version"), "no version");
        for module in crate::cuda::module::ALL {
            assert_eq!(isa::lowered(module.ptx), module.ptx, "{}", module.name);
        }
    }
}
