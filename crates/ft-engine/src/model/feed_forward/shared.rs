//! Expert applied to every token.

use super::mlp::{self, Mlp};
use crate::model::linear::{self, Linear};
use crate::model::pass::batch::Context;
use crate::model::pass::grad_accumulator::GradAccumulator;
use candle_core::Result;
use ft_kernels::padded::Padded;
use ft_kernels::{Tensor, swiglu, upcast};

/// Shared expert: `sigmoid(gate(x)) * mlp(x)`.
#[derive(Clone, Debug)]
pub struct Shared {
    /// `[d]` -> `[d]`.
    pub mlp: Mlp,
    /// `[d]` -> `[1]`.
    pub gate: Linear,
}

/// Saved activations of a shared expert.
#[derive(Debug)]
pub(super) struct SharedSaved {
    pub(super) mlp: mlp::Saved,
    pub(super) gate: linear::Saved,
    /// Output `[t, d]` of the SwiGLU, before the gate.
    pub(super) out: Tensor,
    /// `sigmoid(gate(x))` `[t, 1]`, f32.
    pub(super) open: Tensor,
}

impl Shared {
    /// Computes the expert's output and gate, without their product.
    pub(super) fn saved(&self, x: &Tensor, ctx: &Context) -> Result<SharedSaved> {
        let (out, mlp) = self.mlp.forward(&Padded::of(x)?, ctx)?;
        let (logit, gate) = self.gate.forward(x, ctx)?;
        let open = swiglu::sigmoid(&upcast(&logit)?)?;
        Ok(SharedSaved { mlp, gate, out, open })
    }

    /// Backward pass: returns the gradient of the input.
    pub(super) fn backward(
        &self,
        s: SharedSaved,
        dy: &Tensor,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
    ) -> Result<Tensor> {
        let slope = (&s.open * (1.0 - &s.open)?)?;
        let dlogit = ((upcast(dy)? * upcast(&s.out)?)?.sum_keepdim(1)? * slope)?.to_dtype(dy.dtype())?;
        drop(s.out);
        let dout = dy.broadcast_mul(&s.open.to_dtype(dy.dtype())?)?;
        let dx = self.mlp.backward(s.mlp, &Padded::of(&dout)?, ctx, accum)?;
        self.gate.backward(&s.gate, &dlogit, ctx, accum, Some(dx))
    }
}
