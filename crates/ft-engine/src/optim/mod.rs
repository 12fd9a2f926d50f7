//! Optimizers over flat buffers, learning-rate schedule, gradient norm.

mod norm;
mod offload;
mod optimizer;
mod projected;
mod schedule;
mod update;

pub use norm::{clip_factor, grad_squares, squares_by_flat};
pub use offload::{PIECE, STAGED};
pub use optimizer::{Optimizer, Rate, UpdateArgs};
pub use schedule::Schedule;
