//! Construction of a model from a base: frozen tensors, trained tensors in their buffers.

#[expect(clippy::module_inception, reason = "the type of the folder's name")]
mod build;
mod check;
mod frozen;
pub mod ghost;
mod loader;

pub use build::Build;
pub use check::{check_full, unreached};
