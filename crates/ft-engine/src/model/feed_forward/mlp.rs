//! SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`. Used by dense layers and by each expert of a
//! mixture.

use crate::model::linear::{self, Linear};
use crate::model::pass::batch::Context;
use crate::model::pass::sink::Sink;
use candle_core::Result;
use ft_kernels::Tensor;
use ft_kernels::padded::Padded;
use ft_kernels::swiglu;

/// One SwiGLU feed-forward.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// `[d]` -> `[f]`.
    pub gate: Linear,
    /// `[d]` -> `[f]`.
    pub up: Linear,
    /// `[f]` -> `[d]`.
    pub down: Linear,
}

/// Saved activations. The input of `down` is not saved; backward recomputes it elementwise.
#[derive(Debug)]
pub struct Saved {
    linears: [linear::Saved; 3],
    gate: Tensor,
    up: Tensor,
}

impl Saved {
    /// Drops the input; [`Mlp::restore`] restores it.
    pub fn drop_inputs(&mut self) {
        self.linears[..2].iter_mut().for_each(|l| l.x = None);
    }
}

impl Mlp {
    /// Gate, up and down.
    pub fn linears(&self) -> [&Linear; 3] {
        [&self.gate, &self.up, &self.down]
    }

    /// As [`Mlp::linears`], to change them.
    pub fn linears_mut(&mut self) -> [&mut Linear; 3] {
        [&mut self.gate, &mut self.up, &mut self.down]
    }

    /// A copy with dequantized 4-bit matrices.
    pub fn dequantized(&self) -> Result<Self> {
        Ok(Self {
            gate: self.gate.dequantized()?,
            up: self.up.dequantized()?,
            down: self.down.dequantized()?,
        })
    }

    /// Spare columns for an input like `x`: see [`Linear::fused_rank`].
    pub fn fused_rank(&self, x: &Tensor) -> usize {
        self.gate.fused_rank(x).max(self.up.fused_rank(x))
    }

    /// Recomputes the saved activations, without the product by `down`.
    pub fn recompute(&self, x: &Padded, ctx: &Context) -> Result<Saved> {
        let (gate, gs) = self.gate.forward_padded(x, ctx)?;
        let (up, us) = self.up.forward_padded(x, ctx)?;
        let mut ds = linear::Saved::default();
        if self.down.lora.is_some() {
            ds = self.down.recompute(&swiglu::forward(&gate, &up)?, ctx)?;
            ds.x = None;
        }
        Ok(Saved { linears: [gs, us, ds], gate, up })
    }

    /// Whether the backward pass needs the input.
    pub fn needs_input(&self) -> bool {
        self.gate.needs_input() || self.up.needs_input()
    }

    /// Restores the input dropped by [`Saved::drop_inputs`].
    pub fn restore(&self, s: &mut Saved, x: &Tensor) {
        for (l, s) in [&self.gate, &self.up].into_iter().zip(&mut s.linears) {
            s.x = l.input(x);
        }
    }

    /// Forward pass: `[t, d]` -> `[t, d]`.
    pub fn forward(&self, x: &Padded, ctx: &Context) -> Result<(Tensor, Saved)> {
        let (gate, gs) = self.gate.forward_padded(x, ctx)?;
        let (up, us) = self.up.forward_padded(x, ctx)?;
        let h = swiglu::forward_padded(&gate, &up, self.down.fused_rank(&gate))?;
        let (y, mut ds) = self.down.forward_padded(&h, ctx)?;
        ds.x = None;
        Ok((y, Saved { linears: [gs, us, ds], gate, up }))
    }

    /// Backward pass: returns the gradient of the input. The input of `down` is recomputed together with
    /// the gradients of gate and up, so the weight gradients of `down` come after the gradient of its
    /// input.
    pub fn backward(&self, s: Saved, dy: &Padded, ctx: &Context, sink: &Sink<'_>) -> Result<Tensor> {
        let [gs, us, ds] = s.linears;
        let (dh, later) = self.down.backward_input(&ds, &s.gate, dy, ctx, sink, None)?;
        drop(ds);
        let ranks = [&self.gate, &self.up].map(|l| l.fused_rank_back(&dh, ctx));
        let (dg, du) = match later {
            None => swiglu::backward_padded(&s.gate, &s.up, &dh, ranks)?,
            Some(later) => {
                let (dg, du, h) = swiglu::backward_again(&s.gate, &s.up, dh, ranks)?;
                later.add(&h, sink)?;
                (dg, du)
            }
        };
        drop((s.gate, s.up));
        let dx = self.gate.backward_padded(&gs, &dg, ctx, sink, None)?;
        self.up.backward_padded(&us, &du, ctx, sink, Some(dx))
    }
}
