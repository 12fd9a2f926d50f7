//! Matrix products and decompositions.

mod columns;
pub mod decompose;
pub mod fp8;
pub mod gemm;
mod packing;
pub mod padded;
