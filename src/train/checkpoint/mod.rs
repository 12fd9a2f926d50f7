//! Checkpoints: their contents, the identity of a run, and reloading during a run.

pub mod identity;
mod reload;
pub mod state;

pub use reload::{CheckpointFollower, ModelOverrides, Reload, end_of, ended_at, recipe_of};
