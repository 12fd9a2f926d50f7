//! Conversions of dtype and device.

use crate::tensor::{Real, Tensor};
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
