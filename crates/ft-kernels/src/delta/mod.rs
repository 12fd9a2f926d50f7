//! The gated delta rule: linear attention with a recurrent state, its short causal convolution, and the gated norm of
//! its output (Yang et al., "Gated delta networks", 2024, arXiv 2412.06464).
//!
//! State and convolution start from zero in every document of a packed row, and chunks start with it: a document gives
//! the same values in a row as alone.
//!
//! Axes: `t` tokens, `g` key heads, `h` value heads (a multiple of g), `c` channels: queries `[g, k]`, keys `[g, k]`,
//! values `[h, v]`, end to end.

pub mod conv;
pub mod gated_norm;
mod heads;
pub mod rule;

pub use heads::{Heads, join, split};
pub use rule::State;
