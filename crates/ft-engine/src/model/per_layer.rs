//! Inputs of a layer of its own (Gemma 4): `x + norm(projection(gelu(gate(x)) * input))` after the feed-forward part.

use super::linear::{self, Linear};
use super::norm::Norm;
use super::pass::batch::Context;
use super::pass::grad_accumulator::GradAccumulator;
use candle_core::Result;
use ft_kernels::Tensor;
use ft_kernels::padded::Padded;
use ft_kernels::swiglu::{self, Glu};

/// Use of a layer's inputs.
#[derive(Clone, Debug)]
pub struct PerLayer {
    /// Number of the layer.
    pub layer: usize,
    /// `[d]` -> `[p]`.
    pub gate: Linear,
    /// `[p]` -> `[d]`.
    pub projection: Linear,
    pub norm: Norm,
    /// The elementwise part.
    pub glu: Glu,
}

/// Saved activations.
#[derive(Debug)]
pub struct Saved {
    gate_linear: linear::Saved,
    /// Without the input; `backward` computes it again.
    projection_linear: linear::Saved,
    /// Output of the gate `[t, p]`.
    gate: Tensor,
    /// Output of the projection `[t, d]`.
    out: Tensor,
}

impl Saved {
    /// Drops the input; [`PerLayer::restore`] restores it.
    pub fn drop_inputs(&mut self) {
        self.gate_linear.x = None;
    }
}

impl PerLayer {
    /// A copy with dequantized 4-bit matrices.
    pub fn dequantized(&self) -> Result<Self> {
        Ok(Self {
            gate: self.gate.dequantized()?,
            projection: self.projection.dequantized()?,
            ..self.clone()
        })
    }

    /// Whether the backward pass needs the input.
    pub fn needs_input(&self) -> bool {
        self.gate.needs_input()
    }

    /// Activations of the backward pass, from the input `x` `[t, d]`.
    pub fn recompute(&self, x: &Tensor, ctx: &Context) -> Result<Saved> {
        let inputs = ctx.shared_state.inputs(self.layer, self.projection.weight.dims()?.1)?;
        let (gate, gate_linear) = self.gate.forward(x, ctx)?;
        let h = swiglu::forward(self.glu, &gate, Some(&inputs))?;
        drop(inputs);
        let (out, mut projection_linear) = self.projection.forward(&h, ctx)?;
        projection_linear.x = None;
        Ok(Saved { gate_linear, projection_linear, gate, out })
    }

    /// Forward pass: `[t, d]` -> `[t, d]`.
    pub fn forward(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, Saved)> {
        let saved = self.recompute(x, ctx)?;
        Ok(((x + self.norm.forward(&saved.out)?)?, saved))
    }

    /// Restores the input dropped by [`Saved::drop_inputs`].
    pub fn restore(&self, s: &mut Saved, x: &Tensor) {
        s.gate_linear.x = self.gate.input(x);
    }

    /// Backward pass: returns the gradient of the input, and hands that of the layer's inputs back.
    pub fn backward(
        &self,
        s: Saved,
        dy: &Tensor,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
    ) -> Result<Tensor> {
        let Saved { gate_linear, mut projection_linear, gate, out } = s;
        let d_out = self.norm.backward(&out, dy, accum)?;
        drop(out);
        let inputs = ctx.shared_state.inputs(self.layer, self.projection.weight.dims()?.1)?;
        if self.projection.needs_input() {
            projection_linear.x = Some(swiglu::forward(self.glu, &gate, Some(&inputs))?);
        }
        let dh = self.projection.backward(&projection_linear, &d_out, ctx, accum, None)?;
        drop((projection_linear, d_out));
        let (d_gate, d_inputs) = swiglu::backward_pair(self.glu, &gate, &inputs, &dh)?;
        drop((dh, gate, inputs));
        ctx.shared_state.give_inputs(self.layer, &d_inputs)?;
        drop(d_inputs);
        let dx = self.gate.backward_padded(&gate_linear, &Padded::of(&d_gate)?, ctx, accum, None)?;
        dx + dy
    }
}
