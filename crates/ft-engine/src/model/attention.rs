//! Self-attention: projections, query and key norms, rotary embedding, grouped queries, sliding windows, sinks,
//! output gate.

use super::delta::Parameter;
use super::linear::{self, Linear};
use super::norm::Norm;
use super::pass::across::Outputs;
use super::pass::batch::{Context, Tables};
use super::pass::sink::Sink;
use candle_core::Result;
use ft_kernels::Tensor;
pub use ft_kernels::attention::Cache;
use ft_kernels::attention::{self, Causal, sinks};
use ft_kernels::padded::Padded;
use ft_kernels::{gate, rope};

/// The attention module of a layer.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Queries: `[d]` -> `[h c]`; with a gate `[h 2c]`, per head the query, then the gate.
    pub q: Linear,
    /// Keys: `[d]` -> `[g c]`.
    pub k: Linear,
    /// Values: `[d]` -> `[g c]`.
    pub v: Linear,
    /// Output: `[h c]` -> `[d]`.
    pub o: Linear,
    /// RMSNorm of queries and keys, if the family has them.
    pub qk_norm: Option<QkNorm>,
    /// A logit a query head `[h]` that takes part in the softmax without a key, if the family has them.
    pub sinks: Option<Parameter>,
    pub heads: usize,
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f64,
    /// Index of the rotary embedding in [`Context::ropes`]; `None` without positions.
    pub rope: Option<usize>,
    /// Sliding window: the number of keys visible to a query, itself included.
    pub window: Option<usize>,
    /// Whether the sigmoid of a gate multiplies the output before `o`.
    pub gated: bool,
}

/// RMSNorm of queries and keys.
#[derive(Clone, Debug)]
pub struct QkNorm {
    pub q: Norm,
    pub k: Norm,
    /// Whether a norm covers the whole width `[h c]`; otherwise each head `[c]`.
    pub whole: bool,
}

/// Saved activations.
#[derive(Debug)]
pub struct Saved {
    linears: [linear::Saved; 4],
    /// Queries and keys before their norms; `None` without norms.
    before_norm: Option<(Tensor, Tensor)>,
    /// Queries and keys as attention uses them: normalized and rotated.
    rotated: Option<[Tensor; 2]>,
    v: Tensor,
    out: Outputs,
    /// Gate `[t, h c]`.
    gate: Option<Tensor>,
}

impl Saved {
    /// Drops the activations restored by [`Attention::restore`]: the input, and rotated queries and keys if
    /// they can be recomputed from `before_norm`. The backward pass fetches keys of other ranks again.
    pub fn drop_inputs(&mut self) {
        self.out.drop_keys();
        self.linears[..3].iter_mut().for_each(|l| l.x = None);
        if self.before_norm.is_some() {
            self.rotated = None;
        }
    }
}

/// Heads `[t, h, c]` as rows `[t, h c]`.
fn flat(x: &Tensor) -> Result<Tensor> {
    match x.dims() {
        &[t, h, c] => x.reshape((t, h * c)),
        _ => Ok(x.clone()),
    }
}

impl Attention {
    /// Query, key, value and output projections.
    pub fn linears(&self) -> [&Linear; 4] {
        [&self.q, &self.k, &self.v, &self.o]
    }

    /// As [`Attention::linears`], to change them.
    pub fn linears_mut(&mut self) -> [&mut Linear; 4] {
        [&mut self.q, &mut self.k, &mut self.v, &mut self.o]
    }

    /// A copy with dequantized 4-bit matrices.
    pub fn dequantized(&self) -> Result<Self> {
        let [q, k, v, o] = self.linears();
        Ok(Self {
            q: q.dequantized()?,
            k: k.dequantized()?,
            v: v.dequantized()?,
            o: o.dequantized()?,
            ..self.clone()
        })
    }

    fn causal<'a>(&self, ctx: &'a Context) -> Causal<'a> {
        Causal { seqs: &ctx.seqs, window: self.window, scale: self.scale }
    }

    /// Attention of the queries of this rank, with sinks.
    fn attend(&self, [q, k, v]: [&Tensor; 3], ctx: &Context, cache: Option<&mut Cache>) -> Result<Outputs> {
        // A gate makes a new tensor, without spare columns.
        let (how, rank) = (self.causal(ctx), if self.gated { 0 } else { self.o.fused_rank(q) });
        let out = match (cache, ctx.across) {
            (Some(cache), _) => {
                cache.add(k, v)?;
                attention::forward_cached(q, cache, &how, rank).map(Outputs::one)
            }
            (None, Some(across)) => across.forward([q, k, v], &how, rank),
            (None, None) => attention::forward(q, k, v, &how, rank).map(Outputs::one),
        }?;
        if let Some(s) = &self.sinks {
            let sinks = s.value.to_dtype(q.dtype())?;
            out.parts().try_for_each(|(_, part)| sinks::forward(part, &sinks))?;
        }
        Ok(out)
    }

    /// Rotary tables, if positions enter this layer.
    fn tables<'a>(&self, ctx: &'a Context) -> Result<Option<&'a Tables>> {
        let Some(i) = self.rope else { return Ok(None) };
        match ctx.ropes.get(i) {
            Some(tables) => Ok(Some(tables)),
            None => candle_core::bail!("attention: no rotary tables number {i}"),
        }
    }

    /// Norms computed together with the rotation: those of single heads.
    fn norms(&self) -> Option<rope::Norms<'_>> {
        let QkNorm { q, k, .. } = self.qk_norm.as_ref().filter(|n| !n.whole && self.rope.is_some())?;
        Some(rope::Norms { q: q.scale(), k: k.scale() })
    }

    /// Norms computed on their own, with the shapes that they see.
    fn apart(&self) -> Option<&QkNorm> {
        self.qk_norm.as_ref().filter(|n| n.whole || self.rope.is_none())
    }

    /// Queries and keys as attention uses them, from those before their norms.
    fn rotated(&self, [q, k]: [Tensor; 2], ctx: &Context) -> Result<[Tensor; 2]> {
        let [q, k] = match self.apart() {
            None => [q, k],
            Some(n) => {
                let normed = |norm: &Norm, x: Tensor| {
                    let shape = x.shape().clone();
                    let x = if n.whole { flat(&x)? } else { x };
                    norm.forward(&x)?.reshape(shape)
                };
                [normed(&n.q, q)?, normed(&n.k, k)?]
            }
        };
        match self.tables(ctx)? {
            Some(t) => rope::forward(q, k, self.norms(), &t.cos, &t.sin),
            None => Ok([q, k]),
        }
    }

    /// Backward pass of [`Attention::rotated`]: gradients of queries and keys as rows, with room for `ranks`.
    fn rotated_back(
        &self,
        before: Option<&(Tensor, Tensor)>,
        [dq, dk]: [Tensor; 2],
        ctx: &Context,
        ranks: [usize; 2],
        sink: &Sink<'_>,
    ) -> Result<[Padded; 2]> {
        let rows = |t: &Tensor| Padded::of(&flat(t)?);
        let want = self.norms().and(self.qk_norm.as_ref());
        let want = want.map_or([false; 2], |n| [&n.q, &n.k].map(|n| n.slot.is_some()));
        let [dq, dk] = match self.tables(ctx)? {
            None => [rows(&dq)?, rows(&dk)?],
            Some(t) => {
                let before = before.zip(self.norms()).map(|((q, k), norms)| (q, k, norms));
                let (rotated, [wq, wk]) = rope::backward(before, &t.cos, &t.sin, dq, dk, want, ranks)?;
                if let Some(n) = self.norms().and(self.qk_norm.as_ref()) {
                    n.q.give(wq, sink)?;
                    n.k.give(wk, sink)?;
                }
                rotated
            }
        };
        let (Some(n), Some((q, k))) = (self.apart(), before) else { return Ok([dq, dk]) };
        let back = |norm: &Norm, x: &Tensor, dy: Padded| {
            let x = if n.whole { flat(x)? } else { x.clone() };
            rows(&norm.backward(&x, &dy.values()?.reshape(x.shape())?, sink)?)
        };
        Ok([back(&n.q, q, dq)?, back(&n.k, k, dk)?])
    }

    /// Spare columns for an input like `x`: see [`Linear::fused_rank`].
    pub fn fused_rank(&self, x: &Tensor) -> usize {
        [&self.q, &self.k, &self.v].into_iter().map(|l| l.fused_rank(x)).max().unwrap_or(0)
    }

    /// Whether the backward pass needs the input.
    pub fn needs_input(&self) -> bool {
        [&self.q, &self.k, &self.v].into_iter().any(Linear::needs_input)
    }

    /// Restores the activations dropped by [`Saved::drop_inputs`]: the input `x` if needed, and rotated
    /// queries and keys.
    pub fn restore(&self, s: &mut Saved, x: Option<&Tensor>, ctx: &Context) -> Result<()> {
        for (l, s) in self.linears().into_iter().zip(&mut s.linears[..3]) {
            s.x = x.and_then(|x| l.input(x));
        }
        if let (None, Some((q, k))) = (&s.rotated, &s.before_norm) {
            s.rotated = Some(self.rotated([q.clone(), k.clone()], ctx)?);
        }
        Ok(())
    }

    /// Forward pass: `[t, d]` -> `[t, d]`. With a cache, queries also attend to cached tokens, and the new
    /// keys and values are appended.
    pub fn forward(&self, x: &Padded, ctx: &Context, cache: Option<&mut Cache>) -> Result<(Tensor, Saved)> {
        let (t, _) = x.dims();
        let c = self.head_dim;
        // Reshaped at once: a variable for the flat tensor would keep it alive until the end of the
        // function.
        let by_head = |linear: &Linear, heads: usize| -> Result<(Tensor, linear::Saved)> {
            let (y, saved) = linear.forward_padded(x, ctx)?;
            Ok((y.reshape((t, heads, c))?, saved))
        };
        let (q, gate, qs) = if self.gated {
            let (y, saved) = self.q.forward_padded(x, ctx)?;
            let (q, gate) = gate::split(&y, self.heads)?;
            (q, Some(gate), saved)
        } else {
            let (q, saved) = by_head(&self.q, self.heads)?;
            (q, None, saved)
        };
        let (k, ks) = by_head(&self.k, self.kv_heads)?;
        let (v, vs) = by_head(&self.v, self.kv_heads)?;
        let before_norm = self.qk_norm.as_ref().map(|_| (q.clone(), k.clone()));
        let [q, k] = self.rotated([q, k], ctx)?;
        let out = self.attend([&q, &k, &v], ctx, cache)?;
        let (y, os) = match &gate {
            None => self.o.forward_padded(&out.o, ctx)?,
            Some(gate) => {
                let (y, mut os) = self.o.forward(&gate::forward(&out.o, gate)?, ctx)?;
                // Recomputed by `backward`.
                os.x = None;
                (y, os)
            }
        };
        Ok((y, Saved { linears: [qs, ks, vs, os], before_norm, rotated: Some([q, k]), v, out, gate }))
    }

    /// Backward pass: returns the gradient of the input.
    pub fn backward(&self, s: Saved, dy: &Padded, ctx: &Context, sink: &Sink<'_>) -> Result<Tensor> {
        let (t, _) = dy.dims();
        let c = self.head_dim;
        let [qs, ks, vs, mut os] = s.linears;
        let Some([q, k]) = s.rotated else { candle_core::bail!("backward without queries and keys") };
        if let Some(gate) = s.gate.as_ref().filter(|_| self.o.needs_input()) {
            os.x = Some(gate::forward(&s.out.o, gate)?);
        }
        let d_o = self.o.backward_padded(&os, dy, ctx, sink, None)?;
        let (d_o, d_gate) = match s.gate {
            None => (d_o, None),
            Some(gate) => {
                let (d_o, d_gate) = gate::backward(&s.out.o, &gate, &d_o)?;
                (d_o, Some(d_gate))
            }
        };
        let d_o = d_o.reshape((t, self.heads, c))?;
        let [rq, rk, rv] = [&self.q, &self.k, &self.v].map(|l| l.fused_rank_back(&d_o, ctx));
        if let Some((sinks, slot)) = self.sinks.as_ref().and_then(|s| Some((&s.value, s.slot?))) {
            let sinks = sinks.to_dtype(q.dtype())?;
            for (rows, part) in s.out.parts() {
                let d_o = d_o.narrow(0, rows.start, rows.len())?;
                sink.column_sums(slot, &sinks::backward(part, &sinks, &d_o)?)?;
            }
        }
        let (how, out) = (self.causal(ctx), s.out);
        let (dq, dk, dv) = match ctx.across {
            Some(across) => across.backward([&q, &k, &s.v, &d_o], out, &how, rv)?,
            None => {
                let gradients = attention::backward(&q, &k, &s.v, out.whole()?, &d_o, &how, rv)?;
                drop(out);
                gradients
            }
        };
        drop((d_o, q, k, s.v, os));
        let rq = if d_gate.is_some() { 0 } else { rq };
        let [dq, dk] = self.rotated_back(s.before_norm.as_ref(), [dq, dk], ctx, [rq, rk], sink)?;
        drop(s.before_norm);
        let dq = match d_gate {
            None => dq,
            Some(d_gate) => gate::join(&dq, &d_gate, self.heads)?,
        };
        let dx = self.q.backward_padded(&qs, &dq, ctx, sink, None)?;
        let dx = self.k.backward_padded(&ks, &dk, ctx, sink, Some(dx))?;
        self.v.backward_padded(&vs, &dv, ctx, sink, Some(dx))
    }
}
