//! `ft bench`: times steps of a recipe on random rows, the links between ranks, or parts of a step on a card.

mod fp8;
mod link;
mod matmul;
mod measured;
mod probe;
mod report;
mod steps;

pub use link::run as run_links;
pub use measured::Measured;
pub use probe::{before as probe_before, run as run_probe};
pub use steps::run;
