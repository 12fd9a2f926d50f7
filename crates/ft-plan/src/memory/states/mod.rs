//! Bytes held by one rank for the whole run: weights and optimizer states.

mod frozen;
mod model_states;
mod optimizer;
mod setup;
mod shares;
mod trained;

pub use model_states::{Flow, ModelStates};
pub use optimizer::{nf4, optimizer_bytes, rounded};
pub(super) use shares::own;
