//! Self-attention: projections, per-head query and key norms, rotary embedding, grouped queries, sliding
//! windows.

use super::linear::{self, Linear};
use super::norm::Norm;
use super::pass::across::Outputs;
use super::pass::batch::Context;
use super::pass::sink::Sink;
use candle_core::Result;
use ft_kernels::Tensor;
pub use ft_kernels::attention::Cache;
use ft_kernels::attention::{self, Causal};
use ft_kernels::padded::Padded;
use ft_kernels::rope;

/// The attention module of a layer.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Queries: `[d]` -> `[h c]`.
    pub q: Linear,
    /// Keys: `[d]` -> `[g c]`.
    pub k: Linear,
    /// Values: `[d]` -> `[g c]`.
    pub v: Linear,
    /// Output: `[h c]` -> `[d]`.
    pub o: Linear,
    /// RMSNorm of queries and keys per head, if the family has them.
    pub qk_norm: Option<(Norm, Norm)>,
    pub heads: usize,
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Sliding window: the number of keys visible to a query, itself included.
    pub window: Option<usize>,
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
        let scale = 1.0 / (self.head_dim as f64).sqrt();
        Causal { seqs: &ctx.seqs, window: self.window, scale }
    }

    /// Attention of the queries of this rank.
    fn attend(&self, [q, k, v]: [&Tensor; 3], ctx: &Context, cache: Option<&mut Cache>) -> Result<Outputs> {
        let (how, rank) = (self.causal(ctx), self.o.fused_rank(q));
        match (cache, ctx.across) {
            (Some(cache), _) => {
                cache.add(k, v)?;
                attention::forward_cached(q, cache, &how, rank).map(Outputs::one)
            }
            (None, Some(across)) => across.forward([q, k, v], &how, rank),
            (None, None) => attention::forward(q, k, v, &how, rank).map(Outputs::one),
        }
    }

    fn norms(&self) -> Option<rope::Norms<'_>> {
        let (q, k) = self.qk_norm.as_ref()?;
        Some(rope::Norms { q: (&q.weight, q.eps), k: (&k.weight, k.eps) })
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
            s.rotated = Some(rope::forward(q.clone(), k.clone(), self.norms(), &ctx.cos, &ctx.sin)?);
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
        let (q, qs) = by_head(&self.q, self.heads)?;
        let (k, ks) = by_head(&self.k, self.kv_heads)?;
        let (v, vs) = by_head(&self.v, self.kv_heads)?;
        let before_norm = self.qk_norm.as_ref().map(|_| (q.clone(), k.clone()));
        let [q, k] = rope::forward(q, k, self.norms(), &ctx.cos, &ctx.sin)?;
        let out = self.attend([&q, &k, &v], ctx, cache)?;
        let (y, os) = self.o.forward_padded(&out.o, ctx)?;
        Ok((y, Saved { linears: [qs, ks, vs, os], before_norm, rotated: Some([q, k]), v, out }))
    }

    /// Backward pass: returns the gradient of the input.
    pub fn backward(&self, s: Saved, dy: &Padded, ctx: &Context, sink: &Sink<'_>) -> Result<Tensor> {
        let (t, _) = dy.dims();
        let c = self.head_dim;
        let [qs, ks, vs, os] = s.linears;
        let Some([q, k]) = s.rotated else { candle_core::bail!("backward without queries and keys") };
        let d_o = self.o.backward_padded(&os, dy, ctx, sink, None)?.reshape((t, self.heads, c))?;
        let [rq, rk, rv] = [&self.q, &self.k, &self.v].map(|l| l.fused_rank_back(&d_o, ctx));
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
        let want = self.qk_norm.as_ref().map_or([false; 2], |(q, k)| [q, k].map(|n| n.slot.is_some()));
        let before = s.before_norm.as_ref().zip(self.norms()).map(|((q, k), norms)| (q, k, norms));
        let ([dq, dk], [wq, wk]) = rope::backward(before, &ctx.cos, &ctx.sin, dq, dk, want, [rq, rk])?;
        if let Some((qn, kn)) = &self.qk_norm {
            qn.give(wq, sink)?;
            kn.give(wk, sink)?;
        }
        drop(s.before_norm);
        let dx = self.q.backward_padded(&qs, &dq, ctx, sink, None)?;
        let dx = self.k.backward_padded(&ks, &dk, ctx, sink, Some(dx))?;
        self.v.backward_padded(&vs, &dv, ctx, sink, Some(dx))
    }
}
