//! Shape-only tensors, used by the plan.

use super::ledger::{Allocation, Cost, Ledger};
use candle_core::{DType, Layout, Result, Shape, bail};
use std::sync::Arc;

/// A tensor with shape, dtype and a ledger entry, but without values.
#[derive(Debug)]
pub struct Ghost {
    pub(crate) layout: Layout,
    pub(crate) dtype: DType,
    pub(crate) held: Arc<Allocation>,
}

impl Ghost {
    /// A new tensor recorded on `ledger`.
    pub fn new(ledger: &Ledger, shape: impl Into<Shape>, dtype: DType) -> Self {
        let layout = Layout::contiguous(shape);
        let bytes = layout.shape().elem_count() * dtype.size_in_bytes();
        Self { layout, dtype, held: Arc::new(ledger.hold(bytes as u64)) }
    }

    /// A weight or gradient buffer: permanently allocated, so the ledger does not count it.
    pub fn weight(ledger: &Ledger, shape: impl Into<Shape>, dtype: DType) -> Self {
        Self { layout: Layout::contiguous(shape), dtype, held: Arc::new(ledger.uncounted()) }
    }

    /// Ledger of this tensor.
    pub fn ledger(&self) -> &Ledger {
        self.held.ledger()
    }

    /// Bytes that a matrix product reads as a weight; 0 for activations.
    pub fn weight_bytes(&self) -> f64 {
        if self.held.is_counted() { 0.0 } else { self.bytes() as f64 }
    }

    /// Bytes of memory traffic per read or write; 0 for weights.
    pub fn moved(&self) -> f64 {
        if self.held.is_counted() { self.bytes() as f64 } else { 0.0 }
    }

    /// Records one read or write.
    pub(crate) fn is_moved(&self) {
        self.ledger().work(Cost { moved: self.moved(), ..Cost::default() });
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        (self.layout.shape().elem_count() * self.dtype.size_in_bytes()) as u64
    }

    /// Shape of the tensor.
    pub fn shape(&self) -> &Shape {
        self.layout.shape()
    }

    /// Output of an operation on this tensor: records memory, traffic and one launch.
    pub(crate) fn made(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let made = Self::new(self.ledger(), shape, dtype);
        self.ledger().work(Cost { started: 1.0, moved: self.moved() + made.moved(), ..Cost::default() });
        Ok(made)
    }

    /// Output of an elementwise operation.
    pub(crate) fn like(&self) -> Result<Self> {
        self.made(self.shape().clone(), self.dtype)
    }

    pub(crate) fn reshaped(&self, shape: Shape) -> Result<Self> {
        if shape.elem_count() != self.shape().elem_count() {
            bail!("reshape: {:?} to {shape:?}", self.shape());
        }
        if self.layout.is_contiguous() {
            Ok(self.view(Layout::contiguous_with_offset(shape, self.layout.start_offset())))
        } else {
            self.made(shape, self.dtype)
        }
    }

    pub(crate) fn view(&self, layout: Layout) -> Self {
        Self { layout, dtype: self.dtype, held: Arc::clone(&self.held) }
    }

    pub(crate) fn dims(&self) -> &[usize] {
        self.layout.dims()
    }

    pub(crate) fn reduced(&self, dims: &[usize], keep: bool) -> Vec<usize> {
        let one = |(i, n): (usize, &usize)| match (dims.contains(&i), keep) {
            (true, true) => Some(1),
            (true, false) => None,
            (false, _) => Some(*n),
        };
        self.dims().iter().enumerate().filter_map(one).collect()
    }

    pub(crate) fn with_dim(&self, dim: usize, n: usize) -> Vec<usize> {
        let mut dims = self.dims().to_vec();
        dims[dim] = n;
        dims
    }
}
