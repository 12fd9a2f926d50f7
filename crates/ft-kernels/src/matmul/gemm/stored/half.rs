//! Half-precision matrices as stored.

use crate::cpu;
use crate::tensor::Tensor;
use ::half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use ::half::{bf16, f16};
use candle_core::{CpuStorage, Result, Storage, StorageRef};
use std::ops::Range;

/// The raw bits of a contiguous half-precision matrix on the CPU.
pub(in crate::matmul::gemm) struct Bits<'a> {
    storage: StorageRef<'a>,
    at: Range<usize>,
}

impl<'a> Bits<'a> {
    pub(in crate::matmul::gemm) fn of(t: &'a Tensor) -> Result<Self> {
        let (storage, l) = t.real()?.storage_and_layout();
        match (&*storage, l.contiguous_offsets()) {
            (Storage::Cpu(CpuStorage::BF16(_) | CpuStorage::F16(_)), Some((start, end))) => {
                Ok(Self { storage, at: start..end })
            }
            _ => candle_core::bail!("half precision: a matrix that is not contiguous, or of another type"),
        }
    }

    pub(in crate::matmul::gemm) fn half(&self) -> Half<'_> {
        let (bits, format): (&[u16], Format) = match &*self.storage {
            Storage::Cpu(CpuStorage::BF16(v)) => (v[self.at.clone()].reinterpret_cast(), Format::Bf16),
            Storage::Cpu(CpuStorage::F16(v)) => (v[self.at.clone()].reinterpret_cast(), Format::F16),
            _ => (&[], Format::Bf16),
        };
        Half { bits, format }
    }
}

/// Interpretation of the bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Bf16,
    F16,
}

/// Half-precision values.
#[derive(Clone, Copy)]
pub(in crate::matmul::gemm) struct Half<'a> {
    pub(super) bits: &'a [u16],
    pub(super) format: Format,
}

impl Half<'_> {
    /// Widens values from index `at` on, as many as fit in `to`.
    #[inline(always)]
    pub(in crate::matmul::gemm) fn widen(&self, at: usize, to: &mut [f32]) {
        let bits = &self.bits[at..at + to.len()];
        match self.format {
            Format::Bf16 => {
                to.iter_mut().zip(bits).for_each(|(t, b)| *t = cpu::wide(bf16::from_bits(*b)));
            }
            Format::F16 => bits.reinterpret_cast::<f16>().convert_to_f32_slice(to),
        }
    }
}
