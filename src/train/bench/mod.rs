//! `ft bench`: times steps of a recipe on random rows, or the links between ranks.

mod fp8;
mod link;
mod matmul;
mod report;
mod steps;

pub use link::{MeasuredLink, run as run_links};
pub use steps::{Measured, run};
