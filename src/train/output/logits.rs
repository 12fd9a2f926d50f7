//! Distance of logits.

use candle_core::{DType, Device, Tensor};

/// Relative L2 distance of two tensors of logits: infinite if either contains a non-finite value, 0 if both
/// are zero.
pub fn logits_apart(a: &Tensor, b: &Tensor) -> candle_core::Result<f64> {
    let upcast = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all();
    let (a, b) = (upcast(a)?, upcast(b)?);
    let apart = (a - &b)?.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt();
    let norm = b.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt();
    Ok(match apart / norm {
        _ if apart == 0.0 => 0.0,
        relative if relative.is_finite() => relative,
        _ => f64::INFINITY,
    })
}
