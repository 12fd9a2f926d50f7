//! Backward pass of a linear: gradients of the input and of trained tensors.

use super::{Linear, Saved};
use crate::model::batch::Context;
use crate::model::sink::{Sink, Slot};
use candle_core::Result;
use ft_kernels::dropout::Mask;
use ft_kernels::padded::Padded;
use ft_kernels::{Tensor, dora, gemm, is_half, scaled};

impl Linear {
    /// Backward pass: returns the gradient of the input, added to `dx` if given. Gradients of trained
    /// tensors go to the sink.
    pub fn backward(
        &self,
        saved: &Saved,
        dy: &Tensor,
        ctx: &Context,
        sink: &Sink<'_>,
        dx: Option<Tensor>,
    ) -> Result<Tensor> {
        self.backward_padded(saved, &Padded::of(dy)?, ctx, sink, dx)
    }

    /// As [`Linear::backward`], for an output gradient with spare columns: see [`Linear::room_back`].
    pub fn backward_padded(
        &self,
        saved: &Saved,
        dy: &Padded,
        ctx: &Context,
        sink: &Sink<'_>,
        dx: Option<Tensor>,
    ) -> Result<Tensor> {
        let like = saved.x.as_ref().unwrap_or(dy.all());
        let (dx, later) = self.backward_input(saved, like, dy, ctx, sink, dx)?;
        match (later, &saved.x) {
            (None, _) => {}
            (Some(later), Some(x)) => later.add(x, sink)?,
            (Some(_), None) => candle_core::bail!("backward without the input"),
        }
        Ok(dx)
    }

    /// As [`Linear::backward_padded`], but gradients that need the input are deferred: the returned
    /// [`Later`] adds them. `like` has the input's shape and dtype.
    pub fn backward_input(
        &self,
        saved: &Saved,
        like: &Tensor,
        dy: &Padded,
        ctx: &Context,
        sink: &Sink<'_>,
        dx: Option<Tensor>,
    ) -> Result<(Tensor, Option<Later>)> {
        let padded = dy;
        let dy = &padded.values()?;
        if let Some(slot) = self.bias_slot {
            sink.column_sums(slot, dy)?;
        }
        let weight = match (self.weight_slot, &self.rows) {
            (Some(slot), _) => Some((slot, dy.clone())),
            (None, Some(rows)) => rows.slot.map(|slot| rows.columns(dy).map(|dy| (slot, dy))).transpose()?,
            (None, None) => None,
        };
        let Some(lora) = &self.lora else {
            let dx = self.weight.backward(dy, dx)?;
            return Ok((dx, weight.map(|w| Later { weight: Some(w), a: None })));
        };
        let (Some((a_slot, b_slot)), Some((u, u_rest))) = (lora.slots, &saved.u) else {
            candle_core::bail!("backward through an adapter that does not train");
        };
        let rank = self.room_back(dy, ctx);
        if rank > 0 && padded.room() >= rank {
            sink.product(b_slot, dy, u, *u_rest)?;
            let du = padded.beside(rank)?;
            gemm::matmul_into(&du, dy, false, &lora.b, false, lora.scale)?;
            let dx = self.weight.backward_with(&padded.with(rank)?, &lora.a, dx)?;
            return Ok((dx, Some(Later { weight, a: Some((a_slot, du, 1.0, None)) })));
        }
        let mask = lora.mask(like, ctx)?;
        let k = mask.as_ref().map_or(1.0, |(_, k)| *k);
        let dz = match &saved.dora {
            None => dy.clone(),
            Some((z, g, inverse)) => {
                if let Some(slot) = lora.dora.as_ref().and_then(|d| d.slot) {
                    sink.magnitude(slot, inverse, dy, z)?;
                }
                dora::Scaling { g, add: 0.0, k: 1.0, others: None }.of(dy)?
            }
        };
        sink.product(b_slot, &dz, u, *u_rest)?;
        // s du is rounded only where rounding costs nothing; `rest` is the remaining factor.
        let du = gemm::matmul(&dz, false, &lora.b, false)?;
        let (du, rest) = if is_half(&du) { (du, lora.scale * k) } else { ((du * lora.scale)?, 1.0) };
        let (dx, mask) = match mask {
            None => {
                let dx = self.weight.backward(&dz, dx)?;
                gemm::matmul_acc(&dx, &du, false, &lora.a, false, rest)?;
                (dx, None)
            }
            Some((m, _)) => {
                let mut dxd = gemm::matmul(&scaled(&du, rest)?, false, &lora.a, false)?;
                if let Some((_, g, _)) = &saved.dora {
                    let difference = match is_half(dy) {
                        // g is near 1: a difference of rounded values would be noise.
                        true => dora::Scaling { g, add: -1.0, k, others: None }.of(dy)?,
                        false => (&dz - dy)?,
                    };
                    dxd = self.weight.backward(&difference, Some(dxd))?;
                }
                let dx = self.weight.backward(dy, dx)?;
                (m.add(dxd, dx)?, Some(m))
            }
        };
        Ok((dx, Some(Later { weight, a: Some((a_slot, du, rest, mask)) })))
    }
}

/// Deferred gradients of a linear: those that need the input.
#[derive(Debug)]
pub struct Later {
    /// Slot of the matrix or of its trained rows, with the output's gradient.
    weight: Option<(Slot, Tensor)>,
    /// Slot of A, with the gradient of `x A^T`, a factor, and the dropout mask.
    a: Option<(Slot, Tensor, f64, Option<Mask>)>,
}

impl Later {
    /// Adds the gradients, given the input `x` `[t, i]`.
    pub fn add(self, x: &Tensor, sink: &Sink<'_>) -> Result<()> {
        if let Some((slot, dy)) = self.weight {
            sink.product(slot, &dy, x, 1.0)?;
        }
        match self.a {
            None => Ok(()),
            Some((slot, du, rest, None)) => sink.product(slot, &du, x, rest),
            Some((slot, du, rest, Some(m))) => sink.product(slot, &du, &m.of(x)?, rest),
        }
    }
}
