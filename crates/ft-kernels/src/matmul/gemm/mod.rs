//! Matrix products, with and without accumulation into an existing tensor.
//!
//! CPU products use the `gemm` crate (as candle does), with accumulation (`c += alpha a b`) and without
//! candle's zero-filled output; bf16 uses dot-product instructions if available (`pairs`). CUDA products
//! use cuBLAS (`crate::cuda::gemm`) on matrices with arbitrary row stride (see [`crate::padded`]).
//!
//! | file | purpose |
//! |---|---|
//! | `cpu` | products on slices, and with generated tiles |
//! | `pairs` | bf16 products by the CPU's dot-product instructions |
//! | `few` | products with few rows, if `pairs` does not apply |
//! | `stored` | f32 times a matrix kept in half precision |
//! | `gradients` | products accumulating into slices of one flat buffer |

mod cpu;
mod few;
mod gradients;
mod operands;
pub mod pairs;
mod product;
mod stored;
mod threads;

pub use super::packing::{ghost_tiles, make_slabs, read_caches_ahead, slabs, work};
pub use cpu::{Mat, by_columns, by_tiles, gemm};
pub use gradients::{GradProduct, accumulate};
pub use product::{acc, matmul, matmul_acc, matmul_into, matmul_onto, matmul_scaled, matmul_wide, put};
pub(crate) use product::{product, product_onto};
pub use stored::kept;
pub use threads::serial;

#[cfg(test)]
mod tests;
