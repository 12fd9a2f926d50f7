//! Matrix products and decompositions.

pub mod decompose;
pub mod gemm;
mod packing;
pub mod padded;
