//! Linear attention by the gated delta rule: projections, causal convolution, recurrence, gated norm.

use super::config::family::DeltaProjections;
use super::linear::{self, Linear};
use super::norm::Norm;
use super::pass::batch::Context;
use super::pass::grad_accumulator::{GradAccumulator, Slot};
use candle_core::Result;
use ft_kernels::Tensor;
use ft_kernels::delta::rule::{self, Inputs};
use ft_kernels::delta::{self, Heads, State, conv, gated_norm};
use ft_kernels::padded::Padded;

/// A parameter that is no linear's: value, and gradient slot if trained.
#[derive(Clone, Debug)]
pub struct Parameter {
    pub value: Tensor,
    pub slot: Option<Slot>,
}

/// The token mixer of a layer with linear attention.
#[derive(Clone, Debug)]
pub struct DeltaNet {
    /// Projections of the input, as `layout` says. Split: queries, keys and values `[d]` -> `[c]`, z `[d]` -> `[h v]`,
    /// rates b and decays a `[d]` -> `[h]`. Interleaved: queries, keys, values and z in one, b and a in another.
    pub projections: Vec<Linear>,
    pub layout: DeltaProjections,
    /// Output `[h v]` -> `[d]`.
    pub out: Linear,
    /// Taps of the convolution `[c, n]`.
    pub conv: Parameter,
    /// Logarithm of the decay's factor, and the bias of a, `[h]`.
    pub a_log: Parameter,
    pub bias: Parameter,
    /// Norm of a head's output, with the weight as it is.
    pub norm: Norm,
    pub heads: Heads,
}

/// Error of a layer with another number of projections.
const LACKS: &str = "linear attention has another number of projections: a bug in ft";

/// Outputs of the projections.
#[derive(Debug)]
struct Projected {
    /// Queries, keys and values before the convolution `[t, c]`.
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
}

/// Saved activations. The output of the convolution and the input of `out` are recomputed by the backward pass.
#[derive(Debug)]
pub struct Saved {
    linears: Vec<linear::Saved>,
    out: linear::Saved,
    projected: Projected,
    /// Output of the recurrence `[t, h v]`.
    o: Tensor,
}

impl Saved {
    /// Drops the input; [`DeltaNet::restore`] restores it.
    pub fn drop_inputs(&mut self) {
        self.linears.iter_mut().for_each(|l| l.x = None);
    }
}

impl DeltaNet {
    /// A copy with dequantized 4-bit matrices.
    pub fn dequantized(&self) -> Result<Self> {
        let projections = self.projections.iter().map(Linear::dequantized).collect::<Result<_>>()?;
        Ok(Self { projections, out: self.out.dequantized()?, ..self.clone() })
    }

    /// Spare columns for an input like `x`: see [`Linear::fused_rank`].
    pub fn fused_rank(&self, x: &Tensor) -> usize {
        self.projections.iter().map(|l| l.fused_rank(x)).max().unwrap_or(0)
    }

    /// Whether the backward pass needs the input.
    pub fn needs_input(&self) -> bool {
        self.projections.iter().any(Linear::needs_input)
    }

    /// Restores the input dropped by [`Saved::drop_inputs`].
    pub fn restore(&self, s: &mut Saved, x: Option<&Tensor>) {
        for (l, s) in self.projections.iter().zip(&mut s.linears) {
            s.x = x.and_then(|x| l.input(x));
        }
    }

    /// Outputs of the projections.
    fn project(&self, x: &Padded, ctx: &Context) -> Result<(Projected, Vec<linear::Saved>)> {
        let mut saved = Vec::new();
        let mut output = |linear: &Linear| -> Result<Tensor> {
            let (y, of) = linear.forward_padded(x, ctx)?;
            saved.push(of);
            Ok(y)
        };
        let projected = match &self.projections[..] {
            [qkv, z, b, a] => Projected { qkv: output(qkv)?, z: output(z)?, b: output(b)?, a: output(a)? },
            [qkvz, ba] => {
                let [q, k, v, z] = delta::split(&output(qkvz)?, self.heads.keys, self.heads.of_qkvz())?;
                let qkv = Tensor::cat(&[q, k, v], 1)?;
                let [b, a] = delta::split(&output(ba)?, self.heads.keys, self.heads.of_ba())?;
                Projected { qkv, z, b, a }
            }
            _ => candle_core::bail!("{LACKS}"),
        };
        Ok((projected, saved))
    }

    /// Gradient of the input, from gradients of the projections' outputs.
    fn project_back(
        &self,
        saved: &[linear::Saved],
        Projected { qkv, z, b, a }: Projected,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
    ) -> Result<Tensor> {
        let outputs = match self.layout {
            DeltaProjections::Split => vec![qkv, z, b, a],
            DeltaProjections::Interleaved => {
                let (k, v, keys) = (self.heads.key_width(), self.heads.value_width(), self.heads.keys);
                let part = |from, n| qkv.narrow(1, from, n)?.contiguous();
                let parts = [part(0, k)?, part(k, k)?, part(2 * k, v)?];
                let [dq, dk, dv] = parts.each_ref();
                vec![delta::join([dq, dk, dv, &z], keys)?, delta::join([&b, &a], keys)?]
            }
        };
        let mut dx = None;
        for ((linear, saved), dy) in self.projections.iter().zip(saved).zip(outputs) {
            dx = Some(linear.backward_padded(saved, &Padded::of(&dy)?, ctx, accum, dx)?);
        }
        dx.ok_or_else(|| candle_core::Error::msg(LACKS))
    }

    fn inputs<'a>(&'a self, qkv: &'a Tensor, p: &'a Projected) -> Inputs<'a> {
        let (a_log, bias) = (&self.a_log.value, &self.bias.value);
        Inputs { heads: self.heads, qkv, a: &p.a, b: &p.b, a_log, bias }
    }

    /// Forward pass: `[t, d]` -> `[t, d]`. With a state, the tokens continue its document.
    pub fn forward(
        &self,
        x: &Padded,
        ctx: &Context,
        mut state: Option<&mut State>,
    ) -> Result<(Tensor, Saved)> {
        if ctx.context_parallel.is_some() {
            candle_core::bail!("linear attention over the ranks of a context group: refused by the plan");
        }
        let (projected, linears) = self.project(x, ctx)?;
        let qkv = conv::forward(&projected.qkv, &self.conv.value, &ctx.seqs, state.as_deref_mut())?;
        let o = rule::forward(&self.inputs(&qkv, &projected), &ctx.seqs, state)?;
        drop(qkv);
        let (y, mut out) =
            self.out.forward(&gated_norm::forward(&o, &projected.z, self.norm.scale())?, ctx)?;
        // Recomputed by `backward`.
        out.x = None;
        Ok((y, Saved { linears, out, projected, o }))
    }

    /// Backward pass: returns the gradient of the input.
    pub fn backward(
        &self,
        s: Saved,
        dy: &Padded,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
    ) -> Result<Tensor> {
        let Saved { linears, mut out, projected, o } = s;
        if self.out.needs_input() {
            out.x = Some(gated_norm::forward(&o, &projected.z, self.norm.scale())?);
        }
        let dy = self.out.backward_padded(&out, dy, ctx, accum, None)?;
        drop(out);
        let trains = self.norm.slot.is_some();
        let (d_o, dz, dw) = gated_norm::backward(&o, &projected.z, self.norm.scale(), &dy, trains)?;
        self.norm.give(dw, accum)?;
        drop((o, dy));
        let qkv = conv::forward(&projected.qkv, &self.conv.value, &ctx.seqs, None)?;
        let of_rule = rule::backward(&self.inputs(&qkv, &projected), &d_o, &ctx.seqs)?;
        drop((qkv, d_o));
        for (parameter, dw) in [(&self.a_log, &of_rule.a_log), (&self.bias, &of_rule.bias)] {
            if let Some(slot) = parameter.slot {
                accum.column_sums(slot, dw)?;
            }
        }
        let (taps, slot) = (&self.conv.value, self.conv.slot);
        let (dqkv, dw) = conv::backward(&projected.qkv, taps, &of_rule.qkv, &ctx.seqs, slot.is_some())?;
        if let (Some(slot), Some(dw)) = (slot, dw) {
            // A row of sums holds all taps, as a vector would.
            let flat = Slot { rows: 1, cols: slot.rows * slot.cols, ..slot };
            accum.column_sums(flat, &dw)?;
        }
        drop(projected);
        let grads = Projected { qkv: dqkv, z: dz, b: of_rule.b, a: of_rule.a };
        self.project_back(&linears, grads, ctx, accum)
    }
}
