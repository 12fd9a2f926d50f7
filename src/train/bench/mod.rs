//! `ft bench`: times steps of a recipe on random rows.

mod matmul;
mod report;
mod steps;

pub use steps::{Measured, run};
