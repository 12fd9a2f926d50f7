//! bf16 products with f32 sums, by the CPU's dot-product instructions on pairs of values.
//!
//! ```text
//! left operand      in place if rows are contiguous and even in length, else packed whole: panels of 12 rows
//! right operand     few columns: packed whole, parallel over rows; else parallel over strips of columns,
//!                   each packed (or generated) by its thread, to stay in the core's cache for all rows
//! inner dimension   in blocks of [`block`] values, summed in order
//! ```
//!
//! Results do not depend on the number of threads: every sum runs over the inner dimension in the same
//! order.
//!
//! | path | CPUs |
//! |---|---|
//! | dots | x86-64 with AVX-512 BF16 |
//! | widened | all others: operands are widened to f32 for the `gemm` crate |
//!
//! The environment variable `FT_BF16=widened` (or `dots`) overrides the choice.

mod operands;
#[cfg(target_arch = "x86_64")]
pub(super) mod panels;
mod partition;
mod path;
#[cfg(target_arch = "x86_64")]
mod strips;
#[cfg(not(target_arch = "x86_64"))]
#[path = "absent.rs"]
mod strips;
mod tensors;

pub use operands::{Make, Onto, Right};
pub use partition::packing;
pub use path::{Path, path};
pub use strips::{product_onto, rounded, wide};
pub use tensors::{made, matmul, onto, takes};

#[cfg(test)]
mod tests;
