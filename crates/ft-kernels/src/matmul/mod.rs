//! Matrix products and decompositions.

mod columns;
pub mod decompose;
pub mod gemm;
mod packing;
pub mod padded;
