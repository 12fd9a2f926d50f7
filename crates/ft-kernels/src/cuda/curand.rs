//! Stubs of the cuRAND functions referenced by candle. ft has its own random numbers (`ft_base::rng`), but
//! candle creates a cuRAND generator per device, and a binary linked with cuRAND needs the library (100
//! MB) to start.
//!
//! Definitions in the program take precedence over libraries, and the linker drops libraries without used
//! symbols. Creating and destroying a generator succeeds; drawing numbers is an error.

use std::ffi::{c_int, c_void};

/// CURAND_STATUS_SUCCESS.
const DONE: c_int = 0;
/// CURAND_STATUS_NOT_INITIALIZED.
const NOT_THERE: c_int = 101;

/// # Safety
/// `generator` points to a writable pointer.
#[unsafe(no_mangle)]
unsafe extern "C" fn curandCreateGenerator(generator: *mut *mut c_void, _kind: c_int) -> c_int {
    // SAFETY: `generator` is writable by contract. The stored dangling pointer is never dereferenced.
    unsafe { generator.write(std::ptr::dangling_mut::<u64>().cast()) };
    DONE
}

#[unsafe(no_mangle)]
extern "C" fn curandDestroyGenerator(_generator: *mut c_void) -> c_int {
    DONE
}

#[unsafe(no_mangle)]
extern "C" fn curandSetStream(_generator: *mut c_void, _stream: *mut c_void) -> c_int {
    DONE
}

#[unsafe(no_mangle)]
extern "C" fn curandSetPseudoRandomGeneratorSeed(_generator: *mut c_void, _seed: u64) -> c_int {
    DONE
}

#[unsafe(no_mangle)]
extern "C" fn curandGenerateUniform(_generator: *mut c_void, _out: *mut f32, _count: usize) -> c_int {
    NOT_THERE
}

#[unsafe(no_mangle)]
extern "C" fn curandGenerateUniformDouble(_generator: *mut c_void, _out: *mut f64, _count: usize) -> c_int {
    NOT_THERE
}

#[unsafe(no_mangle)]
extern "C" fn curandGenerateNormal(
    _generator: *mut c_void,
    _out: *mut f32,
    _count: usize,
    _mean: f32,
    _deviation: f32,
) -> c_int {
    NOT_THERE
}

#[unsafe(no_mangle)]
extern "C" fn curandGenerateNormalDouble(
    _generator: *mut c_void,
    _out: *mut f64,
    _count: usize,
    _mean: f64,
    _deviation: f64,
) -> c_int {
    NOT_THERE
}
