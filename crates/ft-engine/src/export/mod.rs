//! Exports of adapters and models to the layouts of other programs.

mod fused;
pub mod gguf;

pub use fused::{Export, Target};
