//! cuRAND's names without cuRAND: ft's random numbers are its own (`ft_base::rng`), but candle makes a generator for each
//! device, and a binary that names cuRAND's functions needs its library (100 MB) to start.
//!
//! A program resolves a name by what it defines itself before it looks into libraries, and the linker leaves a library out
//! from which nothing is needed. A generator can be made and destroyed; to draw from one is an error.

use std::ffi::{c_int, c_void};

/// CURAND_STATUS_SUCCESS.
const DONE: c_int = 0;
/// CURAND_STATUS_NOT_INITIALIZED.
const NOT_THERE: c_int = 101;

/// # Safety
/// `generator` points to a pointer.
#[unsafe(no_mangle)]
unsafe extern "C" fn curandCreateGenerator(generator: *mut *mut c_void, _kind: c_int) -> c_int {
    // SAFETY: the caller's promise. The pointer is never followed.
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
