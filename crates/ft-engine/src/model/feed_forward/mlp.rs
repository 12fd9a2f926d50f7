//! Gated feed-forward: `down(act(gate(x)) * up(x))`. Used by dense layers and by each expert of a mixture.

use crate::model::linear::{self, Linear, Stack};
use crate::model::pass::batch::Context;
use crate::model::pass::grad_accumulator::GradAccumulator;
use candle_core::Result;
use ft_kernels::Tensor;
use ft_kernels::padded::Padded;
use ft_kernels::swiglu::{self, Glu};

/// One gated feed-forward.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// `[d]` -> `[f]`; without `up`, gate and up in one, `[d]` -> `[2 f]`.
    pub gate: Linear,
    /// `[d]` -> `[f]`, if apart.
    pub up: Option<Linear>,
    /// `[f]` -> `[d]`.
    pub down: Linear,
    /// The adapters of gate and up, if computed together.
    pub stack: Option<Stack>,
    /// The elementwise part.
    pub glu: Glu,
}

/// Saved activations. The input of `down` is not saved; backward recomputes it elementwise.
#[derive(Debug)]
pub struct Saved {
    gate_linear: linear::Saved,
    up_linear: Option<linear::Saved>,
    down_linear: linear::Saved,
    gate: Tensor,
    up: Option<Tensor>,
}

impl Saved {
    /// Drops the input; [`Mlp::restore`] restores it.
    pub fn drop_inputs(&mut self) {
        self.gate_linear.x = None;
        self.up_linear.iter_mut().for_each(|l| l.x = None);
    }
}

impl Mlp {
    /// Gate, up (if apart) and down.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> + Clone {
        [Some(&self.gate), self.up.as_ref(), Some(&self.down)].into_iter().flatten()
    }

    /// As [`Mlp::linears`], to change them.
    pub fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        [Some(&mut self.gate), self.up.as_mut(), Some(&mut self.down)].into_iter().flatten()
    }

    /// A copy with dequantized 4-bit matrices.
    pub fn dequantized(&self) -> Result<Self> {
        let rank = self.stack.as_ref().map_or(0, Stack::all);
        Ok(Self {
            gate: self.gate.dequantized()?,
            up: self.up.as_ref().map(|up| up.dequantized_with(rank)).transpose()?,
            down: self.down.dequantized()?,
            stack: self.stack.clone(),
            glu: self.glu,
        })
    }

    /// The linears of the input.
    fn first(&self) -> impl DoubleEndedIterator<Item = &Linear> + Clone {
        std::iter::once(&self.gate).chain(&self.up)
    }

    /// Spare columns for an input like `x`: see [`Linear::fused_rank`].
    pub fn fused_rank(&self, x: &Tensor) -> usize {
        self.first().map(|l| l.fused_rank(x)).max().unwrap_or(0)
    }

    /// Outputs of gate and up, with an empty entry for `down`.
    fn enter(&self, x: &Padded, ctx: &Context) -> Result<Saved> {
        let low = self.stack.as_ref().map(|s| s.low(self.first(), &x.values()?)).transpose()?;
        let mut low = low.into_iter().flatten();
        let (gate, gate_linear) = self.gate.forward_with(x, low.next(), ctx)?;
        let (up, up_linear) =
            self.up.as_ref().map(|l| l.forward_with(x, low.next(), ctx)).transpose()?.unzip();
        Ok(Saved { gate_linear, up_linear, down_linear: linear::Saved::default(), gate, up })
    }

    /// Recomputes the saved activations, without the product by `down`.
    pub fn recompute(&self, x: &Padded, ctx: &Context) -> Result<Saved> {
        let mut s = self.enter(x, ctx)?;
        if self.down.lora.is_some() {
            let h = swiglu::forward(self.glu, &s.gate, s.up.as_ref())?;
            s.down_linear = self.down.recompute(&h, ctx)?;
            s.down_linear.x = None;
        }
        Ok(s)
    }

    /// Whether the backward pass needs the input.
    pub fn needs_input(&self) -> bool {
        self.first().any(Linear::needs_input)
    }

    /// Restores the input dropped by [`Saved::drop_inputs`].
    pub fn restore(&self, s: &mut Saved, x: &Tensor) {
        s.gate_linear.x = self.gate.input(x);
        if let (Some(l), Some(s)) = (&self.up, &mut s.up_linear) {
            s.x = l.input(x);
        }
    }

    /// Forward pass: `[t, d]` -> `[t, d]`.
    pub fn forward(&self, x: &Padded, ctx: &Context) -> Result<(Tensor, Saved)> {
        let mut s = self.enter(x, ctx)?;
        // like a row of the product, for the choice of a path
        let rank = self.down.fused_rank(&s.gate);
        let h = swiglu::forward_padded(self.glu, &s.gate, s.up.as_ref(), rank)?;
        let y;
        (y, s.down_linear) = self.down.forward_padded(&h, ctx)?;
        s.down_linear.x = None;
        Ok((y, s))
    }

    /// Backward pass: returns the gradient of the input. The input of `down` is recomputed together with
    /// the gradients of gate and up, so the weight gradients of `down` come after the gradient of its
    /// input.
    pub fn backward(
        &self,
        s: Saved,
        dy: &Padded,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
    ) -> Result<Tensor> {
        let Saved { gate_linear, up_linear, down_linear, gate, up } = s;
        let like = match &up {
            Some(_) => gate.clone(),
            None => gate.narrow(1, 0, gate.dim(1)? / 2)?,
        };
        let (dh, later) = self.down.backward_input(&down_linear, &like, dy, ctx, accum, None)?;
        drop((like, down_linear));
        let rank = |l: &Linear| l.fused_rank_back(&dh, ctx);
        let stack = self.stack.as_ref().filter(|s| s.trains(self.first(), &dh));
        let ranks = match (stack, &self.up) {
            (Some(stack), Some(_)) => [0, stack.all()],
            (_, up) => [rank(&self.gate), up.as_ref().map_or(0, rank)],
        };
        let (dg, du) = match later {
            None => swiglu::backward_padded(self.glu, &gate, up.as_ref(), &dh, ranks)?,
            Some(later) => {
                let (dg, du, h) = swiglu::backward_again(self.glu, &gate, up.as_ref(), dh, ranks)?;
                later.add(&h, accum)?;
                (dg, du)
            }
        };
        drop((gate, up));
        if let (Some(stack), Some(up), Some(saved), Some(du)) = (stack, &self.up, &up_linear, &du) {
            return stack.backward(vec![(&self.gate, &gate_linear, dg), (up, saved, du.clone())], accum);
        }
        let dx = self.gate.backward_padded(&gate_linear, &dg, ctx, accum, None)?;
        match (&self.up, up_linear, du) {
            (Some(up), Some(saved), Some(du)) => up.backward_padded(&saved, &du, ctx, accum, Some(dx)),
            _ => Ok(dx),
        }
    }
}
