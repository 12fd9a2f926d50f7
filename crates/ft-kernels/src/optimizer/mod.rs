//! AdamW on flat buffers, with f32 or 8-bit moments, and sums of squares for the gradient norm.
//!
//! The update matches PyTorch (`torch.optim.AdamW`, Loshchilov and Hutter 2019):
//! `p -= lr wd p; m += (g - m)(1 - b1); v = b2 v + (1 - b2) g^2;`
//! `p -= lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)`.

mod adamw;
mod adamw8bit;
mod cuda;
mod draws;
mod eight_bit;
mod rounding;
mod settings;
mod squares;

pub use adamw::{adamw, adamw_rounded};
pub use adamw8bit::{adamw8bit, adamw8bit_rounded};
pub use draws::Draws;
pub use eight_bit::{BLOCK, EightBit, SMALLEST, ZERO, maps};
pub use rounding::round;
pub use settings::{AdamW, PIECE};
pub use squares::{Squares, finite, sum_squares};

#[cfg(all(test, target_arch = "x86_64"))]
mod host_tests;
#[cfg(test)]
mod tests;
