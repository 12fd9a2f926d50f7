//! RMSNorm as a module.

use super::sink::{Sink, Slot};
use ft_kernels::Tensor;
use ft_kernels::norm;
use ft_kernels::padded::Padded;
use candle_core::Result;

/// One norm.
#[derive(Clone, Debug)]
pub struct Norm {
    /// Weight `[d]`.
    pub weight: Tensor,
    /// Where its gradient goes, when it trains.
    pub slot: Option<Slot>,
    /// Added to the mean square.
    pub eps: f64,
}

impl Norm {
    /// [.., d] -> [.., d].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        norm::forward(x, &self.weight, self.eps)
    }

    /// [t, d] -> [t, d], with room for `rank` columns more.
    pub fn forward_padded(&self, x: &Tensor, rank: usize) -> Result<Padded> {
        norm::forward_padded(x, &self.weight, self.eps, rank)
    }

    /// `x + a`, and the norm of it, with room for `rank` columns more.
    pub fn forward_add(&self, x: &Tensor, a: Tensor, rank: usize) -> Result<(Tensor, Padded)> {
        norm::forward_add(x, a, &self.weight, self.eps, rank)
    }

    /// The gradient of the input `x`; the weight's goes to the sink.
    pub fn backward(&self, x: &Tensor, dy: &Tensor, sink: &Sink<'_>) -> Result<Tensor> {
        let (dx, dw) = norm::backward(x, &self.weight, self.eps, dy, self.slot.is_some())?;
        self.give(dw, sink)?;
        Ok(dx)
    }

    /// As [`Norm::backward`], with `add` added to the gradient of the input, and room for `rank` columns more.
    pub fn backward_add(
        &self,
        x: &Tensor,
        dy: &Tensor,
        add: &Padded,
        rank: usize,
        sink: &Sink<'_>,
    ) -> Result<Padded> {
        let (dx, dw) = norm::backward_add(x, &self.weight, self.eps, dy, add, self.slot.is_some(), rank)?;
        self.give(dw, sink)?;
        Ok(dx)
    }

    /// Sends the weight's gradient, in rows whose sum it is, to the sink.
    pub fn give(&self, dw: Option<Tensor>, sink: &Sink<'_>) -> Result<()> {
        match (self.slot, dw) {
            (Some(slot), Some(dw)) => sink.column_sums(slot, &dw),
            _ => Ok(()),
        }
    }
}
