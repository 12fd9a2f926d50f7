//! Typed views of CPU tensors.

use super::float::Float;
use super::half;
use crate::Tensor;
use crate::tensor::Real;
use ::half::bf16;
use candle_core::{CpuStorage, DType, Device, Result, Shape, Storage, StorageRef};
use std::marker::PhantomData;
use std::ops::{Deref, Range};

/// Whether a tensor is on the CPU and uses the CPU kernels.
pub fn is_cpu(t: &Tensor) -> bool {
    t.device().is_cpu()
}

/// Like [`is_cpu`], for operations composed on other devices: see
/// [`On::is_native`](crate::tensor::On::is_native).
pub fn is_native(t: &Tensor) -> bool {
    t.device().is_native()
}

/// Real of a CPU tensor in row-major order, borrowed if dtype and layout allow, else converted.
pub enum View<'a, T> {
    /// A range of the tensor's storage.
    Borrowed(StorageRef<'a>, usize, usize, PhantomData<T>),
    /// Converted values.
    Owned(Vec<T>),
}

impl<T: Float> Deref for View<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            View::Borrowed(s, start, end, _) => match &**s {
                Storage::Cpu(s) => s.as_slice::<T>().map(|s| &s[*start..*end]).unwrap_or(&[]),
                _ => &[],
            },
            View::Owned(v) => v,
        }
    }
}

/// Views a CPU tensor as `T`.
pub fn view<T: Float>(t: &Tensor) -> Result<View<'_, T>> {
    let t = t.real()?;
    if t.dtype() == T::DTYPE {
        let (s, l) = t.storage_and_layout();
        if let Some((start, end)) = l.contiguous_offsets() {
            return Ok(View::Borrowed(s, start, end, PhantomData));
        }
    }
    if let Some(v) = widened(t) {
        return Ok(View::Owned(v));
    }
    Ok(View::Owned(t.to_dtype(T::DTYPE)?.flatten_all()?.to_vec1()?))
}

/// Real of a contiguous half-precision tensor, with one copy instead of two.
fn widened<T: Float>(t: &Real) -> Option<Vec<T>> {
    let (s, l) = t.storage_and_layout();
    let (start, end) = l.contiguous_offsets()?;
    match &*s {
        Storage::Cpu(CpuStorage::BF16(v)) => Some(half::each(&v[start..end], |x| T::widened(half::wide(*x)))),
        Storage::Cpu(CpuStorage::F16(v)) => Some(half::each(&v[start..end], |x| T::widened(x.to_f32()))),
        _ => None,
    }
}

/// Real of a contiguous bf16 tensor on the CPU.
pub struct Halves<'a>(StorageRef<'a>, Range<usize>);

impl<'a> Halves<'a> {
    /// Views a tensor.
    ///
    /// # Errors
    /// A tensor that is not contiguous, not bf16, or not on the CPU.
    pub fn of(t: &'a Tensor) -> Result<Self> {
        let (s, l) = t.real()?.storage_and_layout();
        match (&*s, l.contiguous_offsets()) {
            (Storage::Cpu(CpuStorage::BF16(_)), Some((start, end))) => Ok(Self(s, start..end)),
            _ => candle_core::bail!("bf16: a tensor that is not contiguous, or of another type"),
        }
    }
}

impl Deref for Halves<'_> {
    type Target = [bf16];
    fn deref(&self) -> &[bf16] {
        match &*self.0 {
            Storage::Cpu(CpuStorage::BF16(v)) => &v[self.1.clone()],
            _ => &[],
        }
    }
}

/// Creates a CPU tensor of `dtype` from values.
pub fn tensor<T: Float>(v: Vec<T>, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    half::to_dtype(&Real::from_vec(v, shape.into(), &Device::Cpu)?, dtype).map(Tensor::Real)
}
