//! 4-bit weights in bitsandbytes' formats and in MXFP4.
//!
//! Dequantization and products with 4-bit matrices are in [`ft_kernels::quantized`].

mod agree;
mod codebook;
mod encode;
mod error;
mod lazy;
mod merge_cost;
mod mxfp4;
mod source;
mod stored;

#[cfg(test)]
mod dequantized_tests;
#[cfg(test)]
mod tests;

pub use crate::files::MXFP4_BLOCK;
pub use agree::agreement;
pub use codebook::{CodeTables, Type};
pub use encode::{BLOCK, Encoded, GROUP, Nested, lazy_nf4, scales_of};
pub use error::Error;
pub use lazy::{LazyMatrix, LazyScales, LazyVector};
pub use merge_cost::MergeCost;
pub use mxfp4::MXFP4_PARTS;
pub use source::{applies_to, dtype_of, from_files, scales};
pub use stored::{Entry, entries, find, open, problems, read, source_dtype};
