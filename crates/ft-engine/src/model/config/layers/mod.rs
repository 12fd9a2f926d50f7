//! Keys by which layers differ.

mod attention;
pub(super) mod by_layer;
mod delta;

pub(super) use attention::TYPES;
