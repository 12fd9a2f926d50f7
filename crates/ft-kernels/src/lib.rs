//! Operations with forward and backward passes, one concept per file.
//!
//! Each has two implementations behind one function: a kernel of our own (on CPU slices, generic over f32 and
//! f64: see [`cpu`]; for some on CUDA) and a composition of candle operations, used on CUDA without such a
//! kernel. Tests compare CPU kernels with finite differences in f64, and compositions with CPU kernels.
//!
//! Axes in names: `t` tokens, `d` model width, `h` heads, `o`/`i` out and in features, `v` vocabulary, `e`
//! experts, `k` experts per token, `n` rows sorted by expert.
//!
//! Models use tensors only through these operations ([`tensor`]), which also run on ghosts: shape-only
//! tensors with memory and arithmetic recorded by a [`ledger`]. Compositions support ghosts without further
//! code; kernels record their cost explicitly (see [`cpu::ghosts`]).
//!
//! All `unsafe` code is in this module, apart from system calls in `store` and the counting allocator of
//! `log`.

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

/// Converts to the dtype of sums, norms and losses: f32, or f64 for f64.
pub fn upcast(t: &Tensor) -> Result<Tensor> {
    if t.dtype() == DType::F64 { Ok(t.clone()) } else { t.to_dtype(DType::F32) }
}

/// Whether the dtype is bf16 or f16. Factors on such tensors are applied in f32: candle's product rounds the
/// factor as well, which gives a systematic error.
pub fn is_half(t: &Tensor) -> bool {
    matches!(t.dtype(), DType::BF16 | DType::F16)
}

/// `x` times a factor, with a single rounding.
pub fn scaled(x: &Tensor, factor: f64) -> Result<Tensor> {
    if factor == 1.0 {
        return Ok(x.clone());
    }
    if is_half(x) { (upcast(x)? * factor)?.to_dtype(x.dtype()) } else { x * factor }
}

/// Copies a tensor to the host; of a view, only the visible part. (Between devices candle copies the whole
/// storage of a view.)
pub fn to_host(view: &Real) -> Result<Real> {
    if view.device().is_cpu() { view.contiguous() } else { view.force_contiguous()?.to_device(&Device::Cpu) }
}
