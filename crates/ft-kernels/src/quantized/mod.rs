//! Matrices in 4-bit quantization blocks, and products without ever holding the full dequantized matrix.
//!
//! Value `n` (row-major) is `code[c_n] * scale[n / block]`, rounded to the dtype of the original matrix
//! and then to the compute dtype: bit-identical to bitsandbytes. Scales are f32, or with double
//! quantization 8-bit codes of a map, times an absmax per group of scales, plus an offset.
//!
//! | file | purpose |
//! |---|---|
//! | `cpu` | cache-sized tiles, dequantized and multiplied by each thread |
//! | `cuda` | L2-sized tiles, dequantized by `dequantize.cu`, multiplied by cuBLAS; `rows.cu` for few tokens |
//! | `tiles` | tiling on a GPU |
//! | `composed` | fallback by candle operations: small blocks of a cut matrix, other dtypes on a GPU |

mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod dequantized;
mod matrix;
mod products;
pub mod tiles;

#[cfg(feature = "cuda")]
pub(crate) use cuda::{dequantizes, launch as launch_of};

pub use cpu::{few_tokens, tile_width};
pub use matrix::{Codebook, QuantizedMatrix, Scales, dynamic_map};

#[cfg(test)]
mod host_tests;
#[cfg(test)]
mod tests;
