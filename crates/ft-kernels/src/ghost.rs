//! A tensor without values: what there is of one in a plan.

use super::ledger::{Allocation, Cost, Ledger};
use super::tensor::Tensor;
use candle_core::{DType, Layout, Result, Shape, bail};
use std::sync::Arc;

/// What there is of a tensor in a plan.
#[derive(Debug)]
pub struct Ghost {
    pub(super) layout: Layout,
    pub(super) dtype: DType,
    pub(super) held: Arc<Allocation>,
}

impl From<Ghost> for Tensor {
    fn from(g: Ghost) -> Self {
        Tensor::Ghost(Arc::new(g))
    }
}

impl Ghost {
    /// Of a new tensor on `ledger`.
    pub fn new(ledger: &Ledger, shape: impl Into<Shape>, dtype: DType) -> Self {
        let layout = Layout::contiguous(shape);
        let bytes = layout.shape().elem_count() * dtype.size_in_bytes();
        Self { layout, dtype, held: Arc::new(ledger.hold(bytes as u64)) }
    }

    /// Of a weight or a gradient buffer, which stay all the time: no visit pays for it.
    pub fn weight(ledger: &Ledger, shape: impl Into<Shape>, dtype: DType) -> Self {
        Self { layout: Layout::contiguous(shape), dtype, held: Arc::new(ledger.uncounted()) }
    }

    /// The ledger that it is in.
    pub fn ledger(&self) -> &Ledger {
        self.held.ledger()
    }

    /// Bytes that a product reads of it beside what goes with its rows: those of a weight.
    pub fn weight_bytes(&self) -> f64 {
        if self.held.is_counted() { 0.0 } else { self.bytes() as f64 }
    }

    /// Bytes that an operation moves which reads or writes it: of a weight, none that count.
    pub fn moved(&self) -> f64 {
        if self.held.is_counted() { self.bytes() as f64 } else { 0.0 }
    }

    /// Writes down that an operation reads or writes it.
    pub(super) fn is_moved(&self) {
        self.ledger().work(Cost { moved: self.moved(), ..Cost::default() });
    }

    /// Bytes of its values.
    pub fn bytes(&self) -> u64 {
        (self.layout.shape().elem_count() * self.dtype.size_in_bytes()) as u64
    }

    /// Its shape.
    pub fn shape(&self) -> &Shape {
        self.layout.shape()
    }

    /// The result of an operation that is started for it.
    pub(super) fn made(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let made = Self::new(self.ledger(), shape, dtype);
        self.ledger().work(Cost { started: 1.0, moved: self.moved() + made.moved(), ..Cost::default() });
        Ok(made)
    }

    /// The result of an operation by element.
    pub(super) fn like(&self) -> Result<Self> {
        self.made(self.shape().clone(), self.dtype)
    }

    pub(super) fn reshaped(&self, shape: Shape) -> Result<Self> {
        if shape.elem_count() != self.shape().elem_count() {
            bail!("reshape: {:?} to {shape:?}", self.shape());
        }
        match self.layout.is_contiguous() {
            true => Ok(self.view(Layout::contiguous_with_offset(shape, self.layout.start_offset()))),
            false => self.made(shape, self.dtype),
        }
    }

    pub(super) fn view(&self, layout: Layout) -> Self {
        Self { layout, dtype: self.dtype, held: Arc::clone(&self.held) }
    }

    pub(super) fn dims(&self) -> &[usize] {
        self.layout.dims()
    }

    pub(super) fn reduced(&self, dims: &[usize], keep: bool) -> Vec<usize> {
        let one = |(i, n): (usize, &usize)| match (dims.contains(&i), keep) {
            (true, true) => Some(1),
            (true, false) => None,
            (false, _) => Some(*n),
        };
        self.dims().iter().enumerate().filter_map(one).collect()
    }

    pub(super) fn with_dim(&self, dim: usize, n: usize) -> Vec<usize> {
        let mut dims = self.dims().to_vec();
        dims[dim] = n;
        dims
    }
}
