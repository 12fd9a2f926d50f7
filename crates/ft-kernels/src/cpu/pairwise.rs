//! Parallel elementwise sums and products on the CPU (candle uses one thread), with the same bits as candle.

use crate::cpu::by_chunks;
use crate::cpu::{narrow, wide};
use crate::tensor::Real;
use candle_core::{CpuStorage, Device, Result, Storage};
use std::ops::Range;

/// `a + b`, for equal shapes.
pub fn add(a: &Real, b: &Real) -> Result<Real> {
    on_threads(a, b, |x, y| x + y).unwrap_or_else(|| a.add(b))
}

/// Elementwise `a b`, for equal shapes.
pub fn mul(a: &Real, b: &Real) -> Result<Real> {
    on_threads(a, b, |x, y| x * y).unwrap_or_else(|| a.mul(b))
}

/// Elementwise `f` of contiguous CPU tensors in f32 or bf16; `None` for other tensors.
fn on_threads(a: &Real, b: &Real, f: impl Fn(f32, f32) -> f32 + Sync) -> Option<Result<Real>> {
    if a.dims() != b.dims() {
        return None;
    }
    let ((sa, la), (sb, lb)) = (a.storage_and_layout(), b.storage_and_layout());
    let (Storage::Cpu(sa), Storage::Cpu(sb)) = (&*sa, &*sb) else { return None };
    let ((a0, a1), (b0, b1)) = (la.contiguous_offsets()?, lb.contiguous_offsets()?);
    let shape = a.shape();
    match (sa, sb) {
        (CpuStorage::F32(x), CpuStorage::F32(y)) => {
            let (x, y) = (&x[a0..a1], &y[b0..b1]);
            let sums = by_chunks(x.len(), |own| x[own.clone()].iter().zip(&y[own]).map(|(x, y)| f(*x, *y)));
            Some(Real::from_vec(sums, shape, &Device::Cpu))
        }
        (CpuStorage::BF16(x), CpuStorage::BF16(y)) => {
            let (x, y) = (&x[a0..a1], &y[b0..b1]);
            let both = |own: Range<usize>| x[own.clone()].iter().zip(&y[own]);
            let sums = by_chunks(x.len(), |own| both(own).map(|(x, y)| narrow(f(wide(*x), wide(*y)))));
            Some(Real::from_vec(sums, shape, &Device::Cpu))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{randn, values};
    use candle_core::DType;

    /// Tensors of several tasks, whole and as views.
    #[test]
    fn the_bits_are_those_of_candle() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            let (a, b) = (randn(1, (300, 257), dtype)?, randn(2, (300, 257), dtype)?);
            for (from, rows) in [(0, 300), (7, 200)] {
                let (a, b) = (a.narrow(0, from, rows)?, b.narrow(0, from, rows)?);
                let (a, b) = (a.real()?, b.real()?);
                assert_eq!(values(&add(a, b)?.into()), values(&a.add(b)?.into()));
                assert_eq!(values(&mul(a, b)?.into()), values(&a.mul(b)?.into()));
            }
        }
        Ok(())
    }
}
