//! Merges an adapter into its base.

pub mod compare;
mod exact;
mod weights;
mod write;

pub use write::{Merged, Merging};
