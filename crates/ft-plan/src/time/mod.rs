//! Time of a step: FLOPs, other costs in equivalent FLOPs, throughput measured by `ft bench`.

pub mod rates;
mod work;

pub use work::{CostModel, Work};
