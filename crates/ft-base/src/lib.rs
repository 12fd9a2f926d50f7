//! Base of `ft`: errors with exit codes, random numbers, files on disk, the terminal, memory, names of hosts.
//!
//! Free of candle; the feature `candle` gives its errors an exit code.

#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, clippy::too_many_lines, reason = "tests write files, and list cases")
)]

#[cfg(test)]
extern crate self as ft_base;

pub mod device_error;
pub mod error;
pub mod memory;
pub mod names;
pub mod rng;
pub mod store;
pub mod terminal;

pub use error::{Error, ExitCode, Failure, Location, Result};

/// Unit tests count allocations as the binary does.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: memory::CountingAllocator = memory::CountingAllocator;
