//! Conversion between f32 and half precision: a vectorized kernel on CUDA, all threads on the CPU. Other
//! conversions use candle, which is scalar and single-threaded.

use super::cpu::by_chunks;
use super::cuda::launch::{Grid, Launch, compiled, empty};
use super::tensor::{Real, Tensor};
use candle_core::{CpuStorage, DType, Device, Result, Storage};
use half::{bf16, f16};

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
        return on_cpu(t, dtype);
    }
    let x = Tensor::Real(t.clone());
    let y = empty(&x, t.shape(), dtype)?;
    let name = format!("cast_{}_{}", t.dtype().as_str(), dtype.as_str());
    let count = t.elem_count();
    let launch = Launch::named(&x, compiled!(CAST), name)?.tensor(&x)?.tensor(&y)?.number(count as u64);
    // SAFETY: both tensors are contiguous, have `count` values and have the dtypes in the kernel's name.
    unsafe { launch.run(Grid::new(count.div_ceil(EACH * THREADS), THREADS as u32)) }?;
    y.real().cloned()
}

/// Rounds to bf16, in a form that compilers vectorize.
#[inline(always)]
pub fn narrow(x: f32) -> bf16 {
    let bits = x.to_bits();
    // add half a unit in the last place, ties to even; NaN stays NaN
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    bf16::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded } as u16)
}

/// Widens exactly to f32.
#[inline(always)]
pub fn wide(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Applies `f` to every value on all threads.
pub fn each<A: Sync, B: Send + Copy>(v: &[A], f: impl Fn(&A) -> B + Sync) -> Vec<B> {
    by_chunks(v.len(), |own| v[own].iter().map(&f))
}

fn on_cpu(t: &Real, dtype: DType) -> Result<Real> {
    let (storage, layout) = t.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        return t.to_dtype(dtype);
    };
    let shape = layout.shape();
    match (storage, dtype) {
        (CpuStorage::BF16(v), _) => Real::from_vec(each(&v[start..end], |x| wide(*x)), shape, &Device::Cpu),
        (CpuStorage::F16(v), _) => Real::from_vec(each(&v[start..end], |x| x.to_f32()), shape, &Device::Cpu),
        (CpuStorage::F32(v), DType::BF16) => {
            Real::from_vec(each(&v[start..end], |x| narrow(*x)), shape, &Device::Cpu)
        }
        (CpuStorage::F32(v), DType::F16) => {
            Real::from_vec(each(&v[start..end], |x| f16::from_f32(*x)), shape, &Device::Cpu)
        }
        _ => t.to_dtype(dtype),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        Ok(())
    }
}
