//! A dense feed-forward part beside a mixture of experts, with separate norms (Gemma 4):
//! `norm(dense(norm(x))) + norm(experts(norm(x)))`, with the router on a norm of `x` times `d^-1/2`.

use super::mixture::Inputs;
use super::mlp::{self, Mlp};
use super::types::{self, Mixture};
use crate::model::norm::Norm;
use crate::model::pass::batch::Context;
use crate::model::pass::grad_accumulator::GradAccumulator;
use candle_core::Result;
use ft_kernels::dispatch::Groups;
use ft_kernels::padded::Padded;
use ft_kernels::route::Balance;
use ft_kernels::{Tensor, upcast};
use std::sync::Arc;

/// Both parts of a layer.
#[derive(Clone, Debug)]
pub struct Beside {
    /// Norms of input and output of the dense part.
    pub dense_norms: [Norm; 2],
    pub dense: Mlp,
    /// Norm of the router's input.
    pub router_norm: Norm,
    /// Norms of input and output of the experts.
    pub norms: [Norm; 2],
    pub mixture: Mixture,
}

/// Saved activations. Those of the linears include the normalized inputs.
#[derive(Debug)]
pub struct Saved {
    dense: mlp::Saved,
    /// Output of the dense part `[t, d]`, before the norm.
    dense_out: Tensor,
    /// Of the mixture, with the router's outputs.
    pub mixture: types::Saved,
    /// Sum of the experts' outputs `[t, d]`, before the norm.
    out: Tensor,
}

impl Saved {
    /// Drops the inputs; [`Beside::restore`] restores them.
    pub fn drop_inputs(&mut self) {
        self.dense.drop_inputs();
        self.mixture.drop_inputs();
    }
}

impl Beside {
    /// A copy with dequantized 4-bit matrices, of the experts those with tokens.
    pub fn dequantized(&self, groups: &Groups) -> Result<Self> {
        let on = self.dense_norms[0].weight.device();
        Ok(Self {
            dense: self.dense.dequantized()?,
            mixture: self.mixture.dequantized(groups, on)?,
            ..self.clone()
        })
    }

    /// Whether the backward pass needs inputs of linears.
    pub fn needs_input(&self) -> bool {
        self.dense.needs_input() || self.mixture.needs_input()
    }

    /// Norm of the router's input, in f32 as the router.
    fn in_f32(&self) -> Result<Norm> {
        Ok(Norm { weight: upcast(&self.router_norm.weight)?, ..self.router_norm.clone() })
    }

    /// Input of the router `[t, d]`, f32.
    fn router_input(&self, x: &Tensor) -> Result<Tensor> {
        self.in_f32()?.forward(&upcast(x)?)? * root(x)?
    }

    /// Forward pass: `[t, d]` -> `[t, d]`. `replay` as in [`Mixture::forward`].
    pub fn forward(&self, x: &Tensor, ctx: &Context, replay: Option<Arc<Groups>>) -> Result<(Tensor, Saved)> {
        let [before, after] = &self.dense_norms;
        let (dense_out, dense) =
            self.dense.forward(&before.forward_padded(x, self.dense.fused_rank(x))?, ctx)?;
        let y = after.forward(&dense_out)?;
        let [before, after] = &self.norms;
        let (router, experts) = (self.router_input(x)?, before.forward(x)?);
        let inputs = Inputs { experts: &experts, router: Some(&router) };
        let (out, mixture) = self.mixture.forward(inputs, ctx, replay)?;
        drop((router, experts));
        let y = (y + after.forward(&out)?)?;
        Ok((y, Saved { dense, dense_out, mixture, out }))
    }

    /// Restores the inputs dropped by [`Saved::drop_inputs`] from the input `x` of both parts.
    pub fn restore(&self, s: &mut Saved, x: &Tensor, ctx: &Context) -> Result<()> {
        if self.dense.needs_input() {
            self.dense.restore(&mut s.dense, &self.dense_norms[0].forward(x)?);
        }
        if self.mixture.needs_input() {
            let (router, experts) = (self.router_input(x)?, self.norms[0].forward(x)?);
            self.mixture.restore(&mut s.mixture, Inputs { experts: &experts, router: Some(&router) }, ctx)?;
        }
        Ok(())
    }

    /// Backward pass: returns the gradient of the input `x`. `balance` as in [`Mixture::backward`].
    pub fn backward(
        &self,
        (x, s): (&Tensor, Saved),
        dy: &Tensor,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
        balance: Option<&Balance>,
    ) -> Result<Tensor> {
        let [before, after] = &self.norms;
        let d = after.backward(&s.out, dy, accum)?;
        drop(s.out);
        let (d, of_router) = self.mixture.backward_apart(s.mixture, &d, ctx, accum, balance)?;
        let dx = before.backward(x, &d, accum)?;
        drop(d);
        let of_router = self.in_f32()?.backward(&upcast(x)?, &(of_router * root(x)?)?, accum)?;
        let dx = (dx + of_router.to_dtype(x.dtype())?)?;
        let [before, after] = &self.dense_norms;
        let d = after.backward(&s.dense_out, dy, accum)?;
        drop(s.dense_out);
        let d = self.dense.backward(s.dense, &Padded::of(&d)?, ctx, accum)?;
        dx + before.backward(x, &d, accum)?
    }
}

/// Factor on the router's input: `d^-1/2`.
fn root(x: &Tensor) -> Result<f64> {
    Ok((x.dim(1)? as f64).powf(-0.5))
}
