//! Config of a model, and the target machine.

mod machine;
pub mod source;

pub use machine::{Target, dtype, machine, quantization, stored};
pub use source::{config_notes, source_path};
