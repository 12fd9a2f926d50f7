//! RMSNorm.

use super::pass::sink::{Sink, Slot};
use candle_core::Result;
use ft_kernels::Tensor;
use ft_kernels::norm;
use ft_kernels::padded::Padded;

/// RMSNorm with a weight.
#[derive(Clone, Debug)]
pub struct Norm {
    /// Weight `[d]`.
    pub weight: Tensor,
    /// Gradient slot, if trained.
    pub slot: Option<Slot>,
    /// Epsilon, added to the mean square.
    pub eps: f64,
    /// Added to the weight: 1 in families that store `w - 1`, else 0.
    pub plus: f64,
}

impl Norm {
    /// Weight and constants, for kernels.
    pub fn scale(&self) -> norm::Scale<'_> {
        norm::Scale { weight: &self.weight, eps: self.eps, plus: self.plus }
    }

    /// Normalizes the last dimension: `[.., d]` -> `[.., d]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        norm::forward(x, self.scale())
    }

    /// `[t, d]` -> `[t, d]`, with `rank` spare columns for an adapter.
    pub fn forward_padded(&self, x: &Tensor, rank: usize) -> Result<Padded> {
        norm::forward_padded(x, self.scale(), rank)
    }

    /// Returns `x + a` and the norm of the sum, the latter with `rank` spare columns.
    pub fn forward_add(&self, x: &Tensor, a: Tensor, rank: usize) -> Result<(Tensor, Padded)> {
        norm::forward_add(x, a, self.scale(), rank)
    }

    /// Returns the gradient of the input `x`; the weight's gradient goes to the sink.
    pub fn backward(&self, x: &Tensor, dy: &Tensor, sink: &Sink<'_>) -> Result<Tensor> {
        let (dx, dw) = norm::backward(x, self.scale(), dy, self.slot.is_some())?;
        self.give(dw, sink)?;
        Ok(dx)
    }

    /// As [`Norm::backward`], plus `add`; the result has `rank` spare columns.
    pub fn backward_add(
        &self,
        x: &Tensor,
        dy: &Tensor,
        add: &Padded,
        rank: usize,
        sink: &Sink<'_>,
    ) -> Result<Padded> {
        let (dx, dw) = norm::backward_add(x, self.scale(), dy, add, self.slot.is_some(), rank)?;
        self.give(dw, sink)?;
        Ok(dx)
    }

    /// Adds the weight's gradient, given as partial sums by row, to the sink.
    pub fn give(&self, dw: Option<Tensor>, sink: &Sink<'_>) -> Result<()> {
        match (self.slot, dw) {
            (Some(slot), Some(dw)) => sink.column_sums(slot, &dw),
            _ => Ok(()),
        }
    }
}
