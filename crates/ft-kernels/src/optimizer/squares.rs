//! Sums of squares, and a check for values that are not finite.

use super::cuda;
use super::settings::CHUNK;
use crate::Tensor;
use crate::cpu::{is_cpu, map, vectorised, view};
use candle_core::{DType, Result};

/// Sum of squares over flat f32 buffers, in f64. On CUDA, one synchronization copies one number to the
/// host.
pub fn sum_squares(buffers: &[Tensor]) -> Result<f64> {
    let mut sum = 0.0;
    for b in buffers.iter().filter(|b| is_cpu(b)) {
        let x = view::<f32>(b)?;
        let parts = map(x.chunks(CHUNK), |c| vectorised(|| squares(c)));
        sum += parts.iter().sum::<f64>();
    }
    let elsewhere: Vec<&Tensor> = buffers.iter().filter(|b| !is_cpu(b)).collect();
    Ok(sum + if elsewhere.is_empty() { 0.0 } else { Squares(cuda::squares(&elsewhere)?).read()? })
}

/// Sum of squares, with independent lanes.
#[inline(always)]
fn squares(x: &[f32]) -> f64 {
    let mut lanes = [0f64; 16];
    let chunks = x.chunks_exact(16);
    let tail: f64 = chunks.remainder().iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    for c in chunks {
        for i in 0..16 {
            lanes[i] += f64::from(c[i]) * f64::from(c[i]);
        }
    }
    lanes.into_iter().sum::<f64>() + tail
}

/// Sum of squares of a flat f32 buffer at the time of the call, read lazily from CUDA.
#[derive(Debug)]
pub struct Squares(Tensor);

impl Squares {
    /// Launches the sum over `buffer`.
    ///
    /// # Errors
    /// Device failure.
    pub fn of(buffer: &Tensor) -> Result<Self> {
        Ok(Self(if is_cpu(buffer) {
            Tensor::new(&[sum_squares(std::slice::from_ref(buffer))?], &candle_core::Device::Cpu)?
        } else {
            cuda::squares(&[buffer])?
        }))
    }

    /// Waits for the sum.
    ///
    /// # Errors
    /// Device failure.
    pub fn read(&self) -> Result<f64> {
        self.0.real()?.to_device(&candle_core::Device::Cpu)?.squeeze(0)?.to_scalar()
    }
}

/// 16-bit values widened at once by [`finite`].
const LOOK: usize = 1 << 20;

/// Whether all values of a contiguous float tensor are finite.
pub fn finite(x: &Tensor) -> Result<bool> {
    if x.dtype() != DType::F32 {
        let (x, mut all) = (x.flatten_all()?, true);
        for start in (0..x.elem_count()).step_by(LOOK) {
            let piece = x.narrow(0, start, LOOK.min(x.elem_count() - start))?;
            all = all && finite(&piece.to_dtype(DType::F32)?)?;
        }
        return Ok(all);
    }
    if is_cpu(x) {
        let x = view::<f32>(x)?;
        return Ok(map(x.chunks(CHUNK), |c| c.iter().all(|x| x.is_finite()))
            .into_iter()
            .all(|finite| finite));
    }
    // squares of finite f32 values never overflow in f64
    Ok(sum_squares(&[x.flatten_all()?])?.is_finite())
}
