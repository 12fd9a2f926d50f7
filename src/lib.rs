//! `ft` fine-tunes open-weight language models from a recipe file.

pub mod adapt;
pub mod cli;
pub mod data;
pub mod error;
pub mod hub;
pub mod kernel;
pub mod log;
pub mod model;
pub mod optim;
pub mod plan;
pub mod recipe;
pub mod rng;
pub mod store;
pub mod train;
pub mod walk;

pub use error::{Error, ExitCode, Place, Result};

/// The unit tests count allocations as the binary does.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: log::memory::Counting = log::memory::Counting;
