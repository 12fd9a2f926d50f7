//! Arithmetic of tensors, with values or without.

mod add;
mod cast;
mod methods;
mod operators;
mod precision;

pub use precision::{is_half, scaled, to_host, upcast};
