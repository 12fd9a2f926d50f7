//! Typed views of CPU tensors.

use super::float::Float;
use super::half;
use crate::Tensor;
use crate::tensor::Real;
use ::half::bf16;
use candle_core::{CpuStorage, DType, Device, Result, Shape, Storage, StorageRef, WithDType};
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

/// Values of a contiguous CPU tensor in its own dtype: a range of its storage.
pub struct Slice<'a, T>(StorageRef<'a>, Range<usize>, PhantomData<T>);

/// Values of a bf16 tensor.
pub type Halves<'a> = Slice<'a, bf16>;
/// Values of a u8 tensor.
pub type Bytes<'a> = Slice<'a, u8>;

impl<'a, T: WithDType> Slice<'a, T> {
    /// Views a tensor.
    ///
    /// # Errors
    /// A tensor that is not contiguous, of another dtype, or not on the CPU.
    pub fn of(t: &'a Tensor) -> Result<Self> {
        let (s, l) = t.real()?.storage_and_layout();
        let here = matches!(&*s, Storage::Cpu(s) if s.as_slice::<T>().is_ok());
        match l.contiguous_offsets() {
            Some((start, end)) if here => Ok(Self(s, start..end, PhantomData)),
            _ => candle_core::bail!(
                "{:?} values of a tensor that is not contiguous, of another dtype, or not on the CPU: a bug in ft",
                T::DTYPE
            ),
        }
    }
}

impl<T: WithDType> Deref for Slice<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match &*self.0 {
            Storage::Cpu(s) => s.as_slice::<T>().map(|s| &s[self.1.clone()]).unwrap_or(&[]),
            _ => &[],
        }
    }
}

/// Values of a CPU tensor in row-major order, borrowed if dtype and layout allow, else converted.
pub enum View<'a, T> {
    /// Those of the tensor.
    Borrowed(Slice<'a, T>),
    /// Converted values.
    Owned(Vec<T>),
}

impl<T: Float> Deref for View<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            View::Borrowed(s) => s,
            View::Owned(v) => v,
        }
    }
}

/// Views a CPU tensor as `T`.
///
/// # Errors
/// A tensor of this dtype on another device.
pub fn view<T: Float>(t: &Tensor) -> Result<View<'_, T>> {
    if t.dtype() == T::DTYPE && t.layout().contiguous_offsets().is_some() {
        return Slice::of(t).map(View::Borrowed);
    }
    let t = t.real()?;
    if let Some(v) = widened(t) {
        return Ok(View::Owned(v));
    }
    Ok(View::Owned(t.to_dtype(T::DTYPE)?.flatten_all()?.to_vec1()?))
}

/// Values of a contiguous half-precision tensor, with one copy instead of two.
fn widened<T: Float>(t: &Real) -> Option<Vec<T>> {
    let (s, l) = t.storage_and_layout();
    let (start, end) = l.contiguous_offsets()?;
    match &*s {
        Storage::Cpu(CpuStorage::BF16(v)) => Some(half::each(&v[start..end], |x| T::widened(half::wide(*x)))),
        Storage::Cpu(CpuStorage::F16(v)) => Some(half::each(&v[start..end], |x| T::widened(x.to_f32()))),
        _ => None,
    }
}

/// Creates a CPU tensor of `dtype` from values.
pub fn tensor<T: Float>(v: Vec<T>, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    half::to_dtype(&Real::from_vec(v, shape.into(), &Device::Cpu)?, dtype).map(Tensor::Real)
}
