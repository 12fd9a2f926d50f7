//! Products of f32 with a right operand kept in half precision, which is widened panel by panel in a
//! core's cache. Nothing is rounded, and sums run in the `gemm` crate's order for the matrix widened
//! whole: results are bit-identical to the latter, for any number of threads.
//!
//! ```text
//! columns          in strips, processed by threads dynamically
//! inner dimension  in the blocks of the crate's own summation, so each panel is one block
//! ```
//!
//! If the crate sums differently (a single row, or very few values), one panel spans the whole inner
//! dimension.

mod half;
mod partition;
mod product;
mod transpose;

pub(super) use half::{Bits, Half};
pub(super) use product::{matmul, onto, takes};

use candle_core::DType;

/// Dtype of a frozen checkpoint matrix in a model computing in `compute`. On the CPU, half precision
/// stays as stored if `compute` is f32, and products widen it in cache. On CUDA it is widened at load
/// time, since cuBLAS has no mixed f32/half product.
pub fn kept(stored: DType, compute: DType, cuda: bool) -> DType {
    let stays = compute == DType::F32 && matches!(stored, DType::BF16 | DType::F16) && !cuda;
    if stays { stored } else { compute }
}

#[cfg(test)]
mod tests;
