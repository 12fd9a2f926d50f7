//! Self-attention as a module: projections, head norms, rotary embedding, grouped queries, windows.

use super::batch::Context;
use super::linear::{self, Linear};
use super::norm::Norm;
use super::sink::Sink;
use crate::kernel::Tensor;
use crate::kernel::attention::{self, Causal};
use crate::kernel::rope;
use candle_core::Result;

/// One attention block.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Queries: `[d]` -> [h c].
    pub q: Linear,
    /// Keys: `[d]` -> [g c].
    pub k: Linear,
    /// Values: `[d]` -> [g c].
    pub v: Linear,
    /// Output: [h c] -> `[d]`.
    pub o: Linear,
    /// Norms of each head's query and key, in families that have them.
    pub qk_norm: Option<(Norm, Norm)>,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Keys that a query sees at the most, itself among them.
    pub window: Option<usize>,
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    linears: [linear::Saved; 4],
    /// Queries and keys before their norms.
    before_norm: Option<(Tensor, Tensor)>,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: attention::Saved,
}

/// Keys and values of earlier tokens, for generation.
#[derive(Debug, Default)]
pub struct Cache {
    kv: Option<(Tensor, Tensor)>,
}

impl Cache {
    /// Forgets all but the first `n` tokens.
    pub fn truncate(&mut self, n: usize) -> Result<()> {
        self.kv = match self.kv.take() {
            Some((k, v)) if n > 0 && n < k.dim(0)? => Some((k.narrow(0, 0, n)?, v.narrow(0, 0, n)?)),
            Some(kv) if n > 0 => Some(kv),
            _ => None,
        };
        Ok(())
    }
}

impl Attention {
    /// The four projections.
    pub fn linears(&self) -> [&Linear; 4] {
        [&self.q, &self.k, &self.v, &self.o]
    }

    /// The same block with its 4-bit matrices dequantized.
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

    /// Forward: [t, d] -> [t, d]. With a cache, earlier tokens are seen too, and these are added to it.
    pub fn forward(&self, x: &Tensor, ctx: &Context, cache: Option<&mut Cache>) -> Result<(Tensor, Saved)> {
        let t = x.dim(0)?;
        let c = self.head_dim;
        // by heads at once: a name that went on holding the flat tensor would keep it alive to the end
        let by_head = |linear: &Linear, heads: usize| -> Result<(Tensor, linear::Saved)> {
            let (y, saved) = linear.forward(x, ctx)?;
            Ok((y.reshape((t, heads, c))?, saved))
        };
        let (mut q, qs) = by_head(&self.q, self.heads)?;
        let (mut k, ks) = by_head(&self.k, self.kv_heads)?;
        let (mut v, vs) = by_head(&self.v, self.kv_heads)?;
        let mut before_norm = None;
        if let Some((qn, kn)) = &self.qk_norm {
            let (nq, nk) = (qn.forward(&q)?, kn.forward(&k)?);
            before_norm = Some((q, k));
            (q, k) = (nq, nk);
        }
        q = rope::apply(&q, &ctx.cos, &ctx.sin, false)?;
        k = rope::apply(&k, &ctx.cos, &ctx.sin, false)?;
        if let Some(cache) = cache {
            if let Some((pk, pv)) = &cache.kv {
                (k, v) = (Tensor::cat(&[pk, &k], 0)?, Tensor::cat(&[pv, &v], 0)?);
            }
            cache.kv = Some((k.clone(), v.clone()));
        }
        let out = attention::forward(&q, &k, &v, &self.causal(ctx))?;
        let (y, os) = self.o.forward(&out.o.reshape((t, self.heads * c))?, ctx)?;
        Ok((y, Saved { linears: [qs, ks, vs, os], before_norm, q, k, v, out }))
    }

    /// Backward: the gradient of the input.
    pub fn backward(&self, s: Saved, dy: &Tensor, ctx: &Context, sink: &Sink<'_>) -> Result<Tensor> {
        let t = dy.dim(0)?;
        let c = self.head_dim;
        let [qs, ks, vs, os] = s.linears;
        let d_o = self.o.backward(&os, dy, ctx, sink, None)?.reshape((t, self.heads, c))?;
        let (mut dq, mut dk, dv) = attention::backward(&s.q, &s.k, &s.v, &s.out, &d_o, &self.causal(ctx))?;
        drop((d_o, s.q, s.k, s.v, s.out, os));
        dq = rope::apply(&dq, &ctx.cos, &ctx.sin, true)?;
        dk = rope::apply(&dk, &ctx.cos, &ctx.sin, true)?;
        if let (Some((qn, kn)), Some((q, k))) = (&self.qk_norm, &s.before_norm) {
            dq = qn.backward(q, &dq, sink)?;
            dk = kn.backward(k, &dk, sink)?;
        }
        drop(s.before_norm);
        let (hq, hk) = (self.heads * c, self.kv_heads * c);
        let dx = self.q.backward(&qs, &dq.reshape((t, hq))?, ctx, sink, None)?;
        let dx = self.k.backward(&ks, &dk.reshape((t, hk))?, ctx, sink, Some(dx))?;
        self.v.backward(&vs, &dv.reshape((t, hk))?, ctx, sink, Some(dx))
    }
}
