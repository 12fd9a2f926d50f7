//! Backward pass of a linear: gradients of the input and of trained tensors.

use super::forward::{Linear, Lora, Saved};
use crate::model::pass::batch::Context;
use crate::model::pass::grad_accumulator::{GradAccumulator, Slot};
use candle_core::Result;
use ft_kernels::dropout::Mask;
use ft_kernels::padded::Padded;
use ft_kernels::{Tensor, dora, gemm, is_half, scaled};

impl Linear {
    /// Backward pass: returns the gradient of the input, added to `dx` if given. Gradients of trained
    /// tensors go to the accumulator.
    pub fn backward(
        &self,
        saved: &Saved,
        dy: &Tensor,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
        dx: Option<Tensor>,
    ) -> Result<Tensor> {
        self.backward_padded(saved, &Padded::of(dy)?, ctx, accum, dx)
    }

    /// As [`Linear::backward`], for an output gradient with spare columns: see [`Linear::fused_rank_back`].
    pub fn backward_padded(
        &self,
        saved: &Saved,
        dy: &Padded,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
        dx: Option<Tensor>,
    ) -> Result<Tensor> {
        let like = saved.x.as_ref().unwrap_or(dy.all());
        let (dx, later) = self.backward_input(saved, like, dy, ctx, accum, dx)?;
        match (later, &saved.x) {
            (None, _) => {}
            (Some(later), Some(x)) => later.add(x, accum)?,
            (Some(_), None) => candle_core::bail!("backward without the input"),
        }
        Ok(dx)
    }

    /// As [`Linear::backward_padded`], but gradients that need the input are deferred: the returned
    /// [`DeferredGradients`] adds them. `like` has the input's shape and dtype.
    pub fn backward_input(
        &self,
        saved: &Saved,
        like: &Tensor,
        dy: &Padded,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
        dx: Option<Tensor>,
    ) -> Result<(Tensor, Option<DeferredGradients>)> {
        let padded = dy;
        let dy = &padded.values()?;
        if let Some(slot) = self.bias_slot {
            accum.column_sums(slot, dy)?;
        }
        let weight = self.weight_gradient(dy)?;
        let Some(lora) = &self.lora else {
            let dx = self.weight.backward(dy, dx)?;
            return Ok((dx, weight.map(|w| DeferredGradients { weight: Some(w), a: None })));
        };
        let (Some((a_slot, b_slot)), Some((u, u_rest))) = (lora.slots, &saved.u) else {
            candle_core::bail!("backward through an adapter that does not train");
        };
        let rank = self.fused_rank_back(dy, ctx);
        if rank > 0 && padded.room() >= rank {
            let du = padded.beside(rank)?;
            lora.low_gradient_into(&du, dy, b_slot, (u, *u_rest), accum)?;
            let dx = self.weight.backward_with(&padded.with(rank)?, &lora.a, dx)?;
            let a = DeferredA { slot: a_slot, du, factor: 1.0, mask: None };
            return Ok((dx, Some(DeferredGradients { weight, a: Some(a) })));
        }
        let mask = lora.mask(like, ctx)?;
        let k = mask.as_ref().map_or(1.0, |(_, k)| *k);
        let dz = lora.unscaled(saved, dy, accum)?;
        let (du, rest) = lora.low_gradient(&dz, k, b_slot, (u, *u_rest), accum)?;
        let (dx, mask) = match mask {
            None => {
                let dx = self.weight.backward(&dz, dx)?;
                gemm::matmul_acc(&dx, &du, false, &lora.a, false, rest)?;
                (dx, None)
            }
            Some((m, _)) => {
                let mut dxd = gemm::matmul(&scaled(&du, rest)?, false, &lora.a, false)?;
                if let Some((_, g, _)) = &saved.dora {
                    let difference = if is_half(dy) {
                        // g is near 1: a difference of rounded values would be noise.
                        dora::Scaling { g, add: -1.0, k, others: None }.of(dy)?
                    } else {
                        (&dz - dy)?
                    };
                    dxd = self.weight.backward(&difference, Some(dxd))?;
                }
                let dx = self.weight.backward(dy, dx)?;
                (m.add(dxd, dx)?, Some(m))
            }
        };
        let a = DeferredA { slot: a_slot, du, factor: rest, mask };
        Ok((dx, Some(DeferredGradients { weight, a: Some(a) })))
    }

    /// Slot of the matrix or of its trained rows, with the output's gradient.
    fn weight_gradient(&self, dy: &Tensor) -> Result<Option<(Slot, Tensor)>> {
        match (self.weight_slot, &self.rows) {
            (Some(slot), _) => Ok(Some((slot, dy.clone()))),
            (None, Some(rows)) => rows.slot.map(|slot| Ok((slot, rows.columns(dy)?))).transpose(),
            (None, None) => Ok(None),
        }
    }
}

impl Lora {
    /// Gradient of `x A^T`, and the remaining part of the factor k s, which is rounded only where rounding
    /// costs nothing. Adds the gradient of B to the accumulator, with the saved `u = x A^T` and its factor.
    fn low_gradient(
        &self,
        dz: &Tensor,
        k: f64,
        b_slot: Slot,
        u: (&Tensor, f64),
        accum: &GradAccumulator<'_>,
    ) -> Result<(Tensor, f64)> {
        if let Some(du) = accum.factors(b_slot, dz, (&self.b, 1.0), u, None)? {
            return Ok((du, self.scale * k));
        }
        accum.product(b_slot, dz, u.0, u.1)?;
        let du = gemm::matmul(dz, false, &self.b, false)?;
        Ok(if is_half(&du) { (du, self.scale * k) } else { ((du * self.scale)?, 1.0) })
    }

    /// On CUDA, the gradient of `s x A^T`, written to `du`, and that of B, added to the accumulator.
    pub(super) fn low_gradient_into(
        &self,
        du: &Tensor,
        dy: &Tensor,
        b_slot: Slot,
        u: (&Tensor, f64),
        accum: &GradAccumulator<'_>,
    ) -> Result<()> {
        if accum.factors(b_slot, dy, (&self.b, self.scale), u, Some(du))?.is_none() {
            accum.product(b_slot, dy, u.0, u.1)?;
            gemm::matmul_into(du, dy, false, &self.b, false, self.scale)?;
        }
        Ok(())
    }

    /// Gradient of the output before DoRA's magnitude; adds the magnitude's gradient to the accumulator.
    fn unscaled(&self, saved: &Saved, dy: &Tensor, accum: &GradAccumulator<'_>) -> Result<Tensor> {
        let Some((z, g, inverse)) = &saved.dora else { return Ok(dy.clone()) };
        if let Some(slot) = self.dora.as_ref().and_then(|d| d.slot) {
            accum.magnitude(slot, inverse, dy, z)?;
        }
        dora::Scaling { g, add: 0.0, k: 1.0, others: None }.of(dy)
    }
}

/// Deferred gradients of a linear: those that need the input.
#[derive(Debug)]
pub struct DeferredGradients {
    /// Slot of the matrix or of its trained rows, with the output's gradient.
    weight: Option<(Slot, Tensor)>,
    a: Option<DeferredA>,
}

/// Deferred gradient of A: `factor du^T drop(x)`.
#[derive(Debug)]
struct DeferredA {
    slot: Slot,
    /// Gradient of `x A^T`.
    du: Tensor,
    factor: f64,
    mask: Option<Mask>,
}

impl DeferredGradients {
    /// Adds the gradients, given the input `x` `[t, i]`.
    pub fn add(self, x: &Tensor, accum: &GradAccumulator<'_>) -> Result<()> {
        if let Some((slot, dy)) = self.weight {
            accum.product(slot, &dy, x, 1.0)?;
        }
        match self.a {
            None => Ok(()),
            Some(DeferredA { slot, du, factor, mask: None }) => accum.product(slot, &du, x, factor),
            Some(DeferredA { slot, du, factor, mask: Some(m) }) => {
                accum.product(slot, &du, &m.of(x)?, factor)
            }
        }
    }
}
