//! Where the gradients of trained tensors go: flat f32 buffers, one a unit of the walk.

use crate::kernel::{embed, gemm};
use candle_core::{Result, Tensor};
use std::cell::RefCell;

/// A trained tensor's place in the flat buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Index among all trained tensors.
    pub index: usize,
    /// Unit of the walk whose buffer holds it.
    pub unit: usize,
    /// First element in that buffer.
    pub offset: usize,
    /// Rows (a vector has one).
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl Slot {
    /// Its part of a flat buffer, [rows, cols].
    pub fn view(&self, flat: &Tensor) -> Result<Tensor> {
        flat.narrow(0, self.offset, self.rows * self.cols)?.reshape((self.rows, self.cols))
    }
}

/// Accumulates gradients, and remembers which tensors were reached.
pub struct Sink<'a> {
    grads: &'a [Option<Tensor>],
    reached: RefCell<Vec<bool>>,
}

impl<'a> Sink<'a> {
    /// A sink over one flat buffer a unit (`None` where nothing trains); `count` trained tensors in all.
    pub fn new(grads: &'a [Option<Tensor>], count: usize) -> Self {
        Self { grads, reached: RefCell::new(vec![false; count]) }
    }

    /// Which trained tensors got a gradient since the sink was made.
    pub fn reached(&self) -> Vec<bool> {
        self.reached.borrow().clone()
    }

    /// Marks a tensor as reached, and gives its gradient [rows, cols].
    fn reach(&self, slot: Slot) -> Result<Tensor> {
        if let Some(r) = self.reached.borrow_mut().get_mut(slot.index) {
            *r = true;
        }
        match self.grads.get(slot.unit) {
            Some(Some(flat)) => slot.view(flat),
            _ => candle_core::bail!("no gradient buffer for unit {}", slot.unit),
        }
    }

    /// `grad += alpha a^T b` for `a` [t, rows], `b` [t, cols].
    pub fn product(&self, slot: Slot, a: &Tensor, b: &Tensor, alpha: f64) -> Result<()> {
        gemm::matmul_acc(&self.reach(slot)?, a, true, b, false, alpha)
    }

    /// `grad += dw`.
    pub fn add(&self, slot: Slot, dw: &Tensor) -> Result<()> {
        gemm::acc(&self.reach(slot)?, dw)
    }

    /// `grad[ids[i]] += dy[i]` for every token.
    pub fn rows(&self, slot: Slot, ids: &Tensor, dy: &Tensor) -> Result<()> {
        embed::backward(&self.reach(slot)?, ids, dy, 1.0)
    }

    /// `grad[:, ids[i]] += dy[i]` for every token.
    pub fn columns(&self, slot: Slot, ids: &Tensor, dy: &Tensor) -> Result<()> {
        let g = self.reach(slot)?;
        let add = dy.to_dtype(g.dtype())?.t()?.contiguous()?;
        g.slice_set(&g.index_add(ids, &add, 1)?, 0, 0)
    }
}
