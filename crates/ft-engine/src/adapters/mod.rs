//! Choice of trained modules, LoRA initialization, PEFT files in and out.

mod error;
pub mod initial;
pub mod peft;
mod selection;
#[cfg(test)]
mod tests;

pub use error::Error;
pub use peft::{Adapter, PeftConfig};
pub use selection::{Choice, Fused, Part, Selection, Tokens, Trained, TrainedPart, part_name, tensor_name};
