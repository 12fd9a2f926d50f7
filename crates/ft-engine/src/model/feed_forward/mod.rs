//! Feed-forward part of a layer: a SwiGLU, or a mixture of experts.
//!
//! Mixture of experts: a router selects the top `k` experts per token; expert outputs are summed, weighted
//! by gates.
//!
//! The router always computes in f32. Experts are SwiGLUs on the rows routed to them; an expert without
//! tokens costs nothing. On the CPU, many experts run in parallel, one thread per expert; a few run one
//! after another, with all threads in every product.
//!
//! Routing decisions are a value (`Groups`); recompute reuses them.
//!
//! On CUDA, routing stays on the device and all experts are computed together (`grouped`). Experts
//! unsupported by grouped products (DoRA, for example) run one after another, with routing lists on the
//! host.
//!
//! Experts may be split over ranks (`expert_parallel`): rows are dispatched to the owners of
//! their experts, and outputs combined.
//!
//! Some families have a shared expert ([`Shared`]): applied to every token and scaled by a sigmoid gate. Gemma 4 has a
//! dense part beside the mixture ([`Beside`]), and factors on the gates.

pub mod beside;
mod device;
mod expert_parallel;
mod grouped;
mod mixture;
pub mod mlp;
mod shared;
mod types;

pub use beside::Beside;
#[cfg(test)]
pub use expert_parallel::{FAULT, Fault};
pub use expert_parallel::{LocalExperts, RowSpec, Saved as DispatchedSaved};
pub use mixture::Inputs;
pub use mlp::Mlp;
pub use shared::Shared;
pub use types::{Mixture, Saved};
