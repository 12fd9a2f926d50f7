//! Constructors of tensors, on a device or on a ledger.

use super::ghost::Ghost;
use super::types::{On, Real, Tensor};
use candle_core::shape::ShapeWithOneHole;
use candle_core::{DType, NdArray, Result, Shape, WithDType};

impl Tensor {
    fn make<'a>(
        on: impl Into<On<'a>>,
        shape: Shape,
        dtype: DType,
        real: impl FnOnce(&candle_core::Device, &Shape) -> Result<Real>,
    ) -> Result<Self> {
        match on.into() {
            On::Real(d) => real(d, &shape).map(Tensor::Real),
            On::Ghost(l) => Ok(Ghost::new(l, shape, dtype).into()),
        }
    }

    /// Zeros.
    pub fn zeros<'a>(shape: impl Into<Shape>, dtype: DType, on: impl Into<On<'a>>) -> Result<Self> {
        Self::make(on, shape.into(), dtype, |d, shape| Real::zeros(shape, dtype, d))
    }

    /// A vector for values that are written before any is read; zeros on the CPU.
    pub fn unset(len: usize, dtype: DType, device: &candle_core::Device) -> Result<Self> {
        match device.is_cuda() {
            true => crate::cuda::launch::empty_on(device, len, dtype).map(Tensor::Real),
            false => Self::zeros(len, dtype, device),
        }
    }

    /// Ones.
    pub fn ones<'a>(shape: impl Into<Shape>, dtype: DType, on: impl Into<On<'a>>) -> Result<Self> {
        Self::make(on, shape.into(), dtype, |d, shape| Real::ones(shape, dtype, d))
    }

    /// A constant tensor.
    pub fn full<'a, T: WithDType>(value: T, shape: impl Into<Shape>, on: impl Into<On<'a>>) -> Result<Self> {
        Self::make(on, shape.into(), T::DTYPE, |d, shape| Real::full(value, shape, d))
    }

    /// The numbers from `start` up to but excluding `end`, in steps of 1.
    pub fn arange<'a, T: WithDType>(start: T, end: T, on: impl Into<On<'a>>) -> Result<Self> {
        let count = (end.to_f64() - start.to_f64()).max(0.0) as usize;
        Self::make(on, count.into(), T::DTYPE, |d, _| Real::arange(start, end, d))
    }

    /// Takes values in row-major order.
    pub fn from_vec<'a, T: WithDType>(
        v: Vec<T>,
        shape: impl ShapeWithOneHole,
        on: impl Into<On<'a>>,
    ) -> Result<Self> {
        let shape = shape.into_shape(v.len())?;
        Self::make(on, shape, T::DTYPE, |d, shape| Real::from_vec(v, shape, d))
    }

    /// Copies values in row-major order.
    pub fn from_slice<'a, T: WithDType>(
        v: &[T],
        shape: impl ShapeWithOneHole,
        on: impl Into<On<'a>>,
    ) -> Result<Self> {
        let shape = shape.into_shape(v.len())?;
        Self::make(on, shape, T::DTYPE, |d, shape| Real::from_slice(v, shape, d))
    }

    /// Creates a tensor from nested arrays.
    pub fn new<'a, A: NdArray>(array: A, on: impl Into<On<'a>>) -> Result<Self> {
        let dtype = candle_core::backend::BackendStorage::dtype(&array.to_cpu_storage());
        Self::make(on, array.shape()?, dtype, |d, _| Real::new(array, d))
    }
}
