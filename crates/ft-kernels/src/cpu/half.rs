//! Conversion between f32 and half precision on all threads; candle uses scalar code on a single thread.

use super::parallel::by_chunks;
use crate::tensor::Real;
use candle_core::{CpuStorage, DType, Device, Result, Storage};
use half::{bf16, f16};

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
pub(super) fn each<A: Sync, B: Send + Copy>(v: &[A], f: impl Fn(&A) -> B + Sync) -> Vec<B> {
    by_chunks(v.len(), |own| v[own].iter().map(&f))
}

/// Converts a CPU tensor to `dtype`.
pub fn to_dtype(t: &Real, dtype: DType) -> Result<Real> {
    let (storage, layout) = t.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        return t.to_dtype(dtype);
    };
    let shape = layout.shape();
    match (storage, dtype) {
        (CpuStorage::BF16(v), DType::F32) => {
            Real::from_vec(each(&v[start..end], |x| wide(*x)), shape, &Device::Cpu)
        }
        (CpuStorage::F16(v), DType::F32) => {
            Real::from_vec(each(&v[start..end], |x| x.to_f32()), shape, &Device::Cpu)
        }
        (CpuStorage::F32(v), DType::BF16) => {
            Real::from_vec(each(&v[start..end], |x| narrow(*x)), shape, &Device::Cpu)
        }
        (CpuStorage::F32(v), DType::F16) => {
            Real::from_vec(each(&v[start..end], |x| f16::from_f32(*x)), shape, &Device::Cpu)
        }
        _ => t.to_dtype(dtype),
    }
}
