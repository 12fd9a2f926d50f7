//! Conversion between f32 and half precision: a vectorized kernel on CUDA, all threads on the CPU. Other
//! conversions use candle, which is scalar and single-threaded.

use crate::cpu;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::tensor::{Real, Tensor};
use candle_core::{DType, Result};

/// Threads per block and values per thread, same as in cast.cu.
const THREADS: usize = 256;
const EACH: usize = 4;

/// Converts `t` to `dtype`.
pub fn to_dtype(t: &Real, dtype: DType) -> Result<Real> {
    let half = |d| matches!(d, DType::BF16 | DType::F16);
    let between = (t.dtype() == DType::F32 && half(dtype)) || (half(t.dtype()) && dtype == DType::F32);
    if !between || !t.is_contiguous() {
        return t.to_dtype(dtype);
    }
    if t.device().is_cpu() {
        return cpu::to_dtype(t, dtype);
    }
    let x = Tensor::Real(t.clone());
    let y = empty(&x, t.shape(), dtype)?;
    let name = format!("cast_{}_{}", t.dtype().as_str(), dtype.as_str());
    let count = t.elem_count();
    let launch = Launch::named(&x, compiled!(CAST), name)?.with(args![&x, &y, count as u64])?;
    // SAFETY: both tensors are contiguous, have `count` values and have the dtypes in the kernel's name.
    unsafe { launch.run(Grid::new(count.div_ceil(EACH * THREADS), THREADS as u32)) }?;
    y.real().cloned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use half::bf16;

    /// All bf16 values, f32 values between them and NaNs round as in the `half` crate, over several tasks.
    #[test]
    fn roundings_are_those_of_the_half_crate() -> Result<()> {
        let all: Vec<f32> = (0..=u16::MAX)
            .flat_map(|high| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| (u32::from(high) << 16) | low))
            .map(f32::from_bits)
            .collect();
        let t = Real::from_slice(&all, all.len(), &Device::Cpu)?;
        let got = to_dtype(&t, DType::BF16)?;
        let want: Vec<u16> = all.iter().map(|x| bf16::from_f32(*x).to_bits()).collect();
        let bits = |t: &Real| -> Result<Vec<u16>> {
            Ok(t.to_vec1::<bf16>()?.into_iter().map(bf16::to_bits).collect())
        };
        assert_eq!(bits(&got)?, want);
        let back = to_dtype(&got, DType::F32)?.to_vec1::<f32>()?;
        assert!(back.iter().zip(&want).all(|(x, b)| x.to_bits() == u32::from(*b) << 16));
        assert_eq!(cpu::to_dtype(&got, DType::F16)?.dtype(), DType::F16);
        Ok(())
    }
}
