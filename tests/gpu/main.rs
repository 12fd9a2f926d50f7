//! The binary on a CUDA device: results vs. PyTorch and vs. the CPU, allocations vs. plans, launches vs.
//! fixed numbers.
//!
//!     cargo test --release --features cuda --test gpu
//!
//! The device is a GPU or an emulator (`.ci/run` uses one if installed). Without a device, the tests print
//! a note and pass.

#![allow(clippy::disallowed_methods, clippy::too_many_lines, reason = "tests write files, and list cases")]

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

// The checks of `examples/gpu_check`.
#[path = "../../examples/gpu_check/four_bit.rs"]
#[allow(dead_code)]
mod four_bit;
#[path = "../../examples/gpu_check/fp8.rs"]
#[allow(dead_code)]
mod fp8_products;
#[path = "../../examples/gpu_check/report.rs"]
mod report;

mod counts;
mod faults;
mod fp8;
mod libraries;
mod probe;
mod ranks;
mod reference;
mod room;
mod same;
#[cfg(feature = "serve")]
mod serve;
mod verbs;

/// Returns true if there is a CUDA device; otherwise prints a note.
pub fn device() -> bool {
    match ft::kernel::cuda::open(0) {
        Ok(_) => true,
        Err(e) => {
            eprintln!("not run: {e}");
            false
        }
    }
}

/// Returns true if the device is an emulated one, of any card; otherwise prints a note.
pub fn emulated() -> bool {
    let name = ft::kernel::cuda::open(0).ok().and_then(|device| ft::kernel::cuda::name(&device));
    let emulated = name.as_ref().is_some_and(|name| name.ends_with("(emulated)"));
    if !emulated {
        eprintln!("not run: {name:?} is one card");
    }
    emulated
}

/// Relative distance.
pub fn apart(a: f64, b: f64) -> f64 {
    (a - b).abs() / b.abs().max(f64::MIN_POSITIVE)
}
