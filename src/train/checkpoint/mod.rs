//! Checkpoints: their contents, the identity of a run, and reloading during a run.

pub mod identity;
pub mod state;
