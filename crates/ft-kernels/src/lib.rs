//! Operations with a forward and a backward, one concept a file.
//!
//! Each has two versions behind one function: ours on CPU slices (generic over f32 and f64, see [`cpu`]),
//! and a composition of candle's own operations, which runs on any device and is what CUDA uses where no
//! kernel of ours exists yet. The tests hold the CPU versions to finite differences in f64 and the
//! compositions to the CPU versions.
//!
//! Axes in names: `t` tokens, `d` model width, `h` heads, `o`/`i` out and in features, `v` vocabulary,
//! `e` experts, `k` experts a token, `n` rows sorted by expert.
//!
//! Models reach tensors only by the operations here ([`tensor`]), which run on ghosts too: tensors without values whose
//! bytes and arithmetic a [`ledger`] takes down. A composition needs nothing more for that; a kernel of our own says what it
//! takes in its ghosts' branch ([`cpu::ghosts`]).
//!
//! `unsafe` is here, and in the allocator that `log` counts with.

pub mod attention;
pub mod bias;
mod blocks;
pub mod bytes;
mod cast;
pub mod cpu;
pub mod crossing;
pub mod cuda;
pub mod decompose;
pub mod dequantized;
pub mod dora;
pub mod dropout;
pub mod embed;
pub mod gemm;
pub mod ghost;
pub mod group;
pub mod grouped;
pub mod ledger;
pub mod loss;
mod make;
pub mod moment;
pub mod noise;
pub mod norm;
pub mod optimizer;
mod packing;
pub mod padded;
mod pairwise;
pub mod quantized;
pub mod rope;
pub mod route;
pub mod spread;
pub mod sum;
pub mod swiglu;
pub mod tensor;
pub mod vacant;

#[doc(hidden)]
pub mod check;

pub use ledger::{Ledger, Machine, Role};
pub use tensor::{Real, Tensor};

use candle_core::{DType, Device, Result};

/// The tensor in the dtype of sums, norms and losses: f32, or f64 for f64.
pub fn upcast(t: &Tensor) -> Result<Tensor> {
    if t.dtype() == DType::F64 { Ok(t.clone()) } else { t.to_dtype(DType::F32) }
}

/// Whether values are in half precision, where a factor is applied in f32: candle's own product would round the factor
/// too, which is an error of one sign, unlike that of rounding values.
pub fn is_half(t: &Tensor) -> bool {
    matches!(t.dtype(), DType::BF16 | DType::F16)
}

/// `x` times a factor, rounded once.
pub fn scaled(x: &Tensor, factor: f64) -> Result<Tensor> {
    if factor == 1.0 {
        return Ok(x.clone());
    }
    if is_half(x) { (upcast(x)? * factor)?.to_dtype(x.dtype()) } else { x * factor }
}

/// A tensor on the host; of a view what it shows. (Between devices candle copies all of what a view looks into.)
pub fn to_host(view: &Real) -> Result<Real> {
    if view.device().is_cpu() { view.contiguous() } else { view.force_contiguous()?.to_device(&Device::Cpu) }
}
