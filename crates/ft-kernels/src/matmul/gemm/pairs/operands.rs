//! Operands and destination of a product.

use crate::matmul::gemm::cpu::Mat;
use half::bf16;
use std::ops::Range;

/// Row-major destination of a product.
pub enum Onto<'a> {
    /// bf16, rounded once.
    Half(&'a mut [bf16]),
    /// f32, unrounded.
    Wide(&'a mut [f32]),
}

/// Fills a tile of the right operand, given its columns and inner indices, in this order.
pub type Make<'s> = dyn Fn(Range<usize>, Range<usize>, &mut [bf16]) + Sync + 's;

/// The right operand [k, n].
#[derive(Clone, Copy)]
pub enum Right<'s> {
    /// A stored matrix.
    Stored(Mat<'s, bf16>),
    /// Generated in tiles of `columns` columns: row-major [inner, columns], or [columns, inner] if
    /// `transposed`.
    Generated {
        /// Generator.
        make: &'s Make<'s>,
        /// Columns per tile.
        columns: usize,
        /// Whether tiles are [columns, inner].
        transposed: bool,
    },
}
