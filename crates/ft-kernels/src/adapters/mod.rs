//! Operations of adapters.

pub mod dora;
pub mod dropout;
pub mod factors;
