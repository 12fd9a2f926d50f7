//! Shared parts of the CPU kernels: typed views of tensors, parallel loops in a fixed order, in-place
//! operations.
//!
//! CPU kernels are generic over [`Float`]: training runs them in f32, finite-difference checks in f64. bf16
//! and f16 tensors are widened to f32 on input and rounded on output.

mod accumulate;
pub mod blocks;
mod cost;
mod float;
mod half;
mod in_place;
mod lookup;
pub mod pairwise;
mod parallel;
mod view;

pub use accumulate::onto;
pub use cost::{ghost_products, ghosts};
pub(crate) use cost::{ghost_products_in, ghosts_in};
pub(crate) use float::on_real;
pub use float::{Float, Value, dot, max, sum};
pub use half::{narrow, to_dtype, wide};
pub use in_place::in_place;
pub use parallel::{ROWS, by_chunks, each, each_on, each_with, map, map_with, vectorised};
pub use view::{Bytes, Halves, Slice, View, is_cpu, is_native, tensor, view};
