//! The binary on a CUDA device: what it computes against PyTorch's numbers and its own on the CPU, what it allocates
//! against its plans, what it launches against fixed numbers.
//!
//!     cargo test --release --features cuda --test gpu
//!
//! The device is a GPU or an emulated one (`.ci/run` has one where it finds an emulator). Without one each test says so and passes.

#[path = "../cli/world.rs"]
#[allow(dead_code)]
mod world;

#[path = "../cli/split.rs"]
#[allow(dead_code)]
mod split;

#[cfg(feature = "serve")]
#[path = "../cli/server.rs"]
#[allow(dead_code)]
mod server;

mod counts;
mod libraries;
mod ranks;
mod reference;
mod room;
mod same;
#[cfg(feature = "serve")]
mod serve;
mod verbs;

/// Whether there is a CUDA device; says so where there is none.
pub fn device() -> bool {
    match ft::kernel::cuda::open(0) {
        Ok(_) => true,
        Err(e) => {
            eprintln!("not run: {e}");
            false
        }
    }
}

/// Relative distance.
pub fn apart(a: f64, b: f64) -> f64 {
    (a - b).abs() / b.abs().max(f64::MIN_POSITIVE)
}
