//! RMSNorm as a module.

use super::sink::{Sink, Slot};
use crate::kernel::Tensor;
use crate::kernel::norm;
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

    /// The gradient of the input `x`; the weight's goes to the sink.
    pub fn backward(&self, x: &Tensor, dy: &Tensor, sink: &Sink<'_>) -> Result<Tensor> {
        let (dx, dw) = norm::backward(x, &self.weight, self.eps, dy, self.slot.is_some())?;
        if let (Some(slot), Some(dw)) = (self.slot, dw) {
            sink.add(slot, &dw)?;
        }
        Ok(dx)
    }
}
