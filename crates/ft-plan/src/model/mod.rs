//! Config of a model, and the machine that runs it.

mod machine;
pub mod source;

pub use machine::{machine, stored};
