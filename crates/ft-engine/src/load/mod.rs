//! Loading of the base model: checkpoint layouts, checks, quantization, LoRA initialization from the weights.

mod base;
mod check;
mod error;
mod fused;
mod initial;
pub mod layout;
mod quantize;

pub use base::{Base, FourBit, Scales};
pub use check::check_tensors;
pub use error::Error;
pub use initial::{Factors, Initials};
pub use quantize::{CACHE_MARKER, Report, quantize, quantize_into};
