//! Time of a step: FLOPs, other costs in equivalent FLOPs, rates of arithmetic and of links measured by `ft bench`.

pub mod actions;
mod bench_cache;
pub mod links;
pub mod probe;
pub mod rates;
mod work;

pub use work::{CostModel, Work};
