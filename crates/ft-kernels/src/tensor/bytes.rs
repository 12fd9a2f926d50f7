//! Byte representation of CPU tensors for transfer between processes of one run, in native byte order.

use crate::Tensor;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage};
use std::ops::Range;

/// Appends the bytes of a range of values to `out`.
///
/// # Errors
/// A tensor not on the CPU, not contiguous, or of an unsupported dtype.
pub fn put(t: &Tensor, values: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
    let t = t.real()?;
    let (storage, layout) = t.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        candle_core::bail!("the bytes of a tensor that is not in order on the CPU");
    };
    if values.end > end - start {
        candle_core::bail!("values {values:?} of {}", end - start);
    }
    let values = start + values.start..start + values.end;
    macro_rules! put {
        ($v:expr) => {
            $v[values].iter().for_each(|x| out.extend_from_slice(&x.to_ne_bytes()))
        };
    }
    match storage {
        CpuStorage::U8(v) => out.extend_from_slice(&v[values]),
        CpuStorage::F32(v) => put!(v),
        CpuStorage::BF16(v) => put!(v),
        CpuStorage::F16(v) => put!(v),
        _ => candle_core::bail!("ranks give no {:?}", t.dtype()),
    }
    Ok(())
}

/// Overwrites the values from index `first` on with the values encoded in `bytes`.
///
/// # Errors
/// See [`put`].
pub fn set(t: &Tensor, first: usize, bytes: &[u8]) -> Result<()> {
    t.real()?.inplace_op1(&Set { first, bytes })
}

struct Set<'a> {
    first: usize,
    bytes: &'a [u8],
}

impl InplaceOp1 for Set<'_> {
    fn name(&self) -> &'static str {
        "set from bytes"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("{}: a tensor that is not in order", self.name());
        };
        macro_rules! set {
            ($v:expr, $t:ty) => {{
                let bytes = self.bytes.chunks_exact(size_of::<$t>());
                let to = $v[start..end].get_mut(self.first..self.first + bytes.len());
                let Some(to) = to else { candle_core::bail!("{}: too many values", self.name()) };
                to.iter_mut().zip(bytes).for_each(|(to, b)| {
                    *to = <$t>::from_ne_bytes(b.try_into().unwrap_or_default());
                });
            }};
        }
        match storage {
            CpuStorage::U8(v) => set!(v, u8),
            CpuStorage::F32(v) => set!(v, f32),
            CpuStorage::BF16(v) => set!(v, half::bf16),
            CpuStorage::F16(v) => set!(v, half::f16),
            _ => candle_core::bail!("{}: of a type that ranks do not give", self.name()),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{randn, values};
    use candle_core::{DType, Device};

    #[test]
    fn tensors_are_set_from_their_bytes() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let from = randn(3, 40, dtype)?.narrow(0, 4, 30)?;
            let to = Tensor::zeros(50, dtype, &Device::Cpu)?;
            let mut bytes = Vec::new();
            put(&from, 5..25, &mut bytes)?;
            assert_eq!(bytes.len(), 20 * dtype.size_in_bytes());
            set(&to.narrow(0, 10, 40)?, 2, &bytes)?;
            let (from, to) = (values(&from), values(&to));
            assert_eq!((&to[12..32], to[11], to[32]), (&from[5..25], 0.0, 0.0));
            assert!(set(&Tensor::zeros(19, dtype, &Device::Cpu)?, 0, &bytes).is_err());
            assert!(put(&Tensor::zeros(19, dtype, &Device::Cpu)?, 0..20, &mut bytes).is_err());
        }
        Ok(())
    }
}
