//! Typed slices of CUDA tensors, and operations that change one in place.

use candle_core::cuda_backend::cudarc::cublas::sys::cudaDataType_t;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, DType, InplaceOp1, Layout, Result, Shape, Storage, StorageRef, Tensor, WithDType,
};
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::Range;

/// The types that kernels on CUDA compute with.
pub trait Number: CudaDType + DeviceRepr + WithDType {
    /// cuBLAS's name of the type.
    const KIND: cudaDataType_t;
}

impl Number for f32 {
    const KIND: cudaDataType_t = cudaDataType_t::CUDA_R_32F;
}

impl Number for bf16 {
    const KIND: cudaDataType_t = cudaDataType_t::CUDA_R_16BF;
}

impl Number for f16 {
    const KIND: cudaDataType_t = cudaDataType_t::CUDA_R_16F;
}

/// Calls `$f::<T>(..)` for the type of a dtype.
macro_rules! on_number {
    ($dtype:expr, $f:ident($($arg:expr),* $(,)?)) => {
        match $dtype {
            candle_core::DType::F32 => $f::<f32>($($arg),*),
            candle_core::DType::BF16 => $f::<half::bf16>($($arg),*),
            candle_core::DType::F16 => $f::<half::f16>($($arg),*),
            other => candle_core::bail!("no CUDA kernel for {other:?}"),
        }
    };
}
pub(crate) use on_number;

/// A contiguous CUDA tensor, held for reading.
pub struct Operand<'a> {
    storage: StorageRef<'a>,
    range: Range<usize>,
}

impl<'a> Operand<'a> {
    /// Takes hold of a tensor.
    ///
    /// # Errors
    /// A tensor that is not contiguous.
    pub fn of(t: &'a Tensor) -> Result<Self> {
        let (storage, layout) = t.storage_and_layout();
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("a CUDA kernel was given a tensor that is not contiguous: {:?}", t.shape());
        };
        Ok(Self { storage, range: start..end })
    }

    /// Its values.
    ///
    /// # Errors
    /// Another dtype, or not on a CUDA device.
    pub fn view<T: CudaDType>(&self) -> Result<CudaView<'_, T>> {
        match &*self.storage {
            Storage::Cuda(s) => Ok(s.as_cuda_slice::<T>()?.slice(self.range.clone())),
            _ => candle_core::bail!("a CUDA kernel was given a tensor of another device"),
        }
    }
}

/// A tensor of what a kernel wrote.
pub fn tensor<T: Number>(slice: CudaSlice<T>, shape: impl Into<Shape>, device: &CudaDevice) -> Tensor {
    let storage = CudaStorage::wrap_cuda_slice(slice, device.clone());
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}

struct Closure<T, F> {
    name: &'static str,
    f: F,
    of: PhantomData<T>,
}

impl<T, F> InplaceOp1 for Closure<T, F>
where
    T: Number,
    F: Fn(&mut CudaViewMut<'_, T>) -> Result<()>,
{
    fn name(&self) -> &'static str {
        self.name
    }
    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        candle_core::bail!("{}: a CUDA kernel was given a tensor of the CPU", self.name)
    }
    fn cuda_fwd(&self, s: &mut CudaStorage, l: &Layout) -> Result<()> {
        let Some((start, end)) = l.contiguous_offsets() else {
            candle_core::bail!("{}: the destination is not contiguous", self.name);
        };
        (self.f)(&mut s.as_cuda_slice_mut::<T>()?.slice_mut(start..end))
    }
}

/// Changes the values of a contiguous CUDA tensor (or contiguous view) in place.
///
/// # Errors
/// Another dtype or device; what `f` says.
pub fn in_place<T: Number>(
    name: &'static str,
    t: &Tensor,
    f: impl Fn(&mut CudaViewMut<'_, T>) -> Result<()>,
) -> Result<()> {
    t.inplace_op1(&Closure { name, f, of: PhantomData })
}

/// Whether a dtype has kernels.
pub fn has(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}
