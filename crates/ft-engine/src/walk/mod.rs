//! The walk: forward and backward passes over the units of a model, as two explicit loops.
//!
//! ```text
//! forward,  layer l:  layer.forward(x) -> save x, on device or host, and activations of the level
//! head:               loss and its gradient, one logit chunk at a time
//! backward, layer l:  dequantize, recompute the activations not saved -> layer.backward
//! ```

mod execution;
mod finite;
pub mod generate;
mod idle;
mod pass;
mod routing;
mod stage;
#[cfg(test)]
mod tests;
mod times;
pub mod visit;
mod walker;

pub use execution::{Dequantize, Execution, Inputs, Recomputed};
pub use finite::{NotFinite, finite};
pub use pass::Pass;
pub use routing::{HostRouting, Load, RouterLosses, Routing, Total, dead, entropy, peak};
pub use stage::{Stage, StageExchange};
pub use times::{Part, Times};
pub use visit::{Hooks, NoHooks, Outline, Reading, Visit};
pub use walker::{Walk, dequantized_layer};
