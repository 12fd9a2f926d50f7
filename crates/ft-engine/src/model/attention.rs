//! Self-attention: projections, query and key norms, rotary embedding, grouped queries, sliding windows, sinks,
//! output gate.

use super::config::rope::Tables;
use super::delta::Parameter;
use super::linear::{self, Linear, Stack};
use super::norm::Norm;
use super::pass::batch::Context;
use super::pass::context_parallel::Outputs;
use super::pass::grad_accumulator::GradAccumulator;
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
    /// Keys: `[d]` -> `[g c]`; `None` where they are an earlier layer's.
    pub k: Option<Linear>,
    /// Values: `[d]` -> `[g c]`; `None` where they are an earlier layer's, or keys before their norm.
    pub v: Option<Linear>,
    /// Output: `[h c]` -> `[d]`.
    pub o: Linear,
    /// The adapters of queries, keys and values, if computed together.
    pub stack: Option<Stack>,
    /// RMSNorm of queries and keys, if the family has them.
    pub qk_norm: Option<QkNorm>,
    /// Logits of query heads `[h]` in the softmax, without keys, if the family has them.
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
    /// Whether `q` makes keys and values too: `[d]` -> `[h c + 2 g c]`.
    pub joint: bool,
    /// Whether the rotary embedding pairs neighboring channels.
    pub rotates_neighbors: bool,
    /// Norm of the heads of values, with a weight of ones, if the family has it.
    pub v_norm: Option<Norm>,
    /// Number of the layer.
    pub layer: usize,
    /// The earlier layer with the keys and values of this one.
    pub producer: Option<usize>,
    /// Whether later layers use the keys and values of this one.
    pub lends: bool,
}

/// RMSNorm of queries and keys.
#[derive(Clone, Debug)]
pub struct QkNorm {
    pub q: Norm,
    /// Absent with the keys.
    pub k: Option<Norm>,
    /// Whether a norm covers the whole width `[h c]`; otherwise each head `[c]`.
    pub whole: bool,
}

/// Saved activations.
#[derive(Debug)]
pub struct Saved {
    linears: [linear::Saved; 4],
    /// Queries and keys before their norms; `None` without norms.
    before_norm: Option<Projected>,
    /// Values before their norm.
    v_before: Option<Tensor>,
    /// Queries and keys as attention uses them: normalized and rotated.
    rotated: Option<[Tensor; 2]>,
    /// Values; `None` if recomputed from `v_before`.
    v: Option<Tensor>,
    out: Outputs,
    /// Gate `[t, h c]`.
    gate: Option<Tensor>,
}

/// Queries `[t, h c]` by head, and keys unless they are an earlier layer's.
type Projected = (Tensor, Option<Tensor>);

impl Saved {
    /// Drops the activations restored by [`Attention::restore`]: the input, and rotated queries and keys if
    /// they can be recomputed from `before_norm`. The backward pass fetches keys of other ranks again.
    pub fn drop_inputs(&mut self) {
        self.out.drop_keys();
        self.linears[..3].iter_mut().for_each(|l| l.x = None);
        if self.before_norm.is_some() {
            self.rotated = None;
        }
        if self.v_before.is_some() {
            self.v = None;
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

/// Moves neighboring channels `[t, h, c]` that rotate together half of the rotated channels apart, as the kernel pairs
/// them, or back. Queries and keys move alike, so that their products stay the same.
fn neighbors_apart(x: &Tensor, tables: &Tables, back: bool) -> Result<Tensor> {
    let ((t, h, c), half) = (x.dims3()?, tables.cos.dim(1)?);
    let pairs = if back { (t, h, 2, half) } else { (t, h, half, 2) };
    let moved = x.narrow(2, 0, 2 * half)?.contiguous()?.reshape(pairs)?.transpose(2, 3)?.contiguous()?;
    let moved = moved.reshape((t, h, 2 * half))?;
    if c == 2 * half {
        return Ok(moved);
    }
    Tensor::cat(&[moved, x.narrow(2, 2 * half, c - 2 * half)?.contiguous()?], 2)
}

impl Attention {
    /// Query, key, value and output projections present in the layer.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.inner().chain([&self.o])
    }

    /// The linears of the input.
    fn inner(&self) -> impl DoubleEndedIterator<Item = &Linear> + Clone {
        std::iter::once(&self.q).chain(&self.k).chain(&self.v)
    }

    /// As [`Attention::linears`], to change them.
    pub fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        std::iter::once(&mut self.q).chain(&mut self.k).chain(&mut self.v).chain([&mut self.o])
    }

    /// A copy with dequantized 4-bit matrices.
    pub fn dequantized(&self) -> Result<Self> {
        let mut copy = self.clone();
        let (last, rank) = (self.inner().count() - 1, self.stack.as_ref().map_or(0, Stack::all));
        for (n, linear) in copy.linears_mut().enumerate() {
            *linear = linear.dequantized_with(if n == last { rank } else { 0 })?;
        }
        Ok(copy)
    }

    fn causal<'a>(&self, ctx: &'a Context) -> Causal<'a> {
        Causal { seqs: &ctx.seqs, window: self.window, scale: self.scale }
    }

    /// Attention of the queries of this rank, with sinks.
    fn attend(&self, [q, k, v]: [&Tensor; 3], ctx: &Context, cache: Option<&mut Cache>) -> Result<Outputs> {
        // A gate makes a new tensor, without spare columns.
        let (how, rank) = (self.causal(ctx), if self.gated { 0 } else { self.o.fused_rank(q) });
        let out = match (cache, &ctx.context_parallel) {
            (Some(cache), _) => {
                let lent = self.producer.map(|l| ctx.shared_state.cache(l)).transpose()?;
                if lent.is_none() {
                    cache.add(k, v)?;
                }
                if self.lends {
                    ctx.shared_state.lend_cache(self.layer, cache);
                }
                attention::forward_cached(q, lent.as_ref().unwrap_or(cache), &how, rank).map(Outputs::one)
            }
            (None, Some(context_parallel)) => context_parallel.forward([q, k, v], &how, rank),
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

    /// Norms computed together with the rotation: those of single heads. Without keys, both are the queries'.
    fn norms(&self) -> Option<rope::Norms<'_>> {
        let QkNorm { q, k, .. } = self.qk_norm.as_ref().filter(|n| !n.whole && self.rope.is_some())?;
        Some(rope::Norms { q: q.scale(), k: k.as_ref().unwrap_or(q).scale() })
    }

    /// Norms computed on their own, not with the rotation.
    fn apart(&self) -> Option<&QkNorm> {
        self.qk_norm.as_ref().filter(|n| n.whole || self.rope.is_none())
    }

    /// Queries and keys as attention uses them, from those before their norms.
    fn rotated(&self, (q, k): Projected, ctx: &Context) -> Result<[Tensor; 2]> {
        let Some(producer) = self.producer else {
            let Some(k) = k else { candle_core::bail!("attention without keys") };
            return self.both_rotated([q, k], ctx);
        };
        // The kernel takes two: the first head stands in for keys.
        let stand_in = q.narrow(1, 0, 1)?.contiguous()?;
        let [q, _] = self.both_rotated([q, stand_in], ctx)?;
        let [k, _] = ctx.shared_state.keys(producer)?;
        Ok([q, k])
    }

    fn both_rotated(&self, [q, k]: [Tensor; 2], ctx: &Context) -> Result<[Tensor; 2]> {
        let [q, k] = match self.apart() {
            None => [q, k],
            Some(n) => {
                let normed = |norm: &Norm, x: Tensor| {
                    let shape = x.shape().clone();
                    let x = if n.whole { flat(&x)? } else { x };
                    match ctx.columns.filter(|_| n.whole) {
                        Some(columns) => norm.forward_over(&x, columns),
                        None => norm.forward(&x),
                    }?
                    .reshape(shape)
                };
                [normed(&n.q, q)?, normed(n.k.as_ref().unwrap_or(&n.q), k)?]
            }
        };
        let Some(t) = self.tables(ctx)? else { return Ok([q, k]) };
        let [q, k] = match self.rotates_neighbors {
            true => [neighbors_apart(&q, t, false)?, neighbors_apart(&k, t, false)?],
            false => [q, k],
        };
        rope::forward(q, k, self.norms(), &t.cos, &t.sin)
    }

    /// Backward pass of [`Attention::both_rotated`]: gradients of queries and keys as rows, with room for `ranks`.
    fn rotated_back(
        &self,
        before: Option<&[Tensor; 2]>,
        [dq, dk]: [Tensor; 2],
        ctx: &Context,
        ranks: [usize; 2],
        accum: &GradAccumulator<'_>,
    ) -> Result<[Padded; 2]> {
        let rows = |t: &Tensor| Padded::of(&flat(t)?);
        let norms = self.norms().and(self.qk_norm.as_ref());
        let trains = |n: &Norm| n.slot.is_some();
        let want = norms.map_or([false; 2], |n| [trains(&n.q), n.k.as_ref().is_some_and(trains)]);
        let [dq, dk] = match self.tables(ctx)? {
            None => [rows(&dq)?, rows(&dk)?],
            Some(t) => {
                let before = before.zip(self.norms()).map(|([q, k], norms)| (q, k, norms));
                let (rotated, [wq, wk]) = rope::backward(before, &t.cos, &t.sin, dq, dk, want, ranks)?;
                if let Some(n) = norms {
                    n.q.give(wq, accum)?;
                    n.k.iter().try_for_each(|n| n.give(wk.clone(), accum))?;
                }
                match (self.rotates_neighbors, rotated) {
                    (false, rotated) => rotated,
                    (true, [dq, dk]) => {
                        let back = |d: Padded, heads: usize| {
                            let by_head = d.values()?.reshape(((), heads, self.head_dim))?;
                            rows(&neighbors_apart(&by_head, t, true)?)
                        };
                        [back(dq, self.heads)?, back(dk, self.kv_heads)?]
                    }
                }
            }
        };
        let (Some(n), Some([q, k])) = (self.apart(), before) else { return Ok([dq, dk]) };
        let back = |norm: &Norm, x: &Tensor, dy: Padded| {
            let x = if n.whole { flat(x)? } else { x.clone() };
            let dy = dy.values()?.reshape(x.shape())?;
            let dx = match ctx.columns.filter(|_| n.whole) {
                Some(columns) => norm.backward_over(&x, &dy, columns, accum),
                None => norm.backward(&x, &dy, accum),
            };
            rows(&dx?)
        };
        let of_k = n.k.as_ref().map_or(Ok(dk.clone()), |n| back(n, k, dk))?;
        Ok([back(&n.q, q, dq)?, of_k])
    }

    /// Queries, keys and values `[t, heads, c]` from a row of all three.
    fn split(&self, y: &Tensor) -> Result<[Tensor; 3]> {
        let (t, c) = (y.dim(0)?, self.head_dim);
        let part = |first: usize, heads: usize| -> Result<Tensor> {
            y.narrow(1, first * c, heads * c)?.contiguous()?.reshape((t, heads, c))
        };
        let (h, g) = (self.heads, self.kv_heads);
        Ok([part(0, h)?, part(h, g)?, part(h + g, g)?])
    }

    /// Values from those before their norm.
    fn normed_values(&self, v: &Tensor) -> Result<Tensor> {
        self.v_norm.as_ref().map_or_else(|| Ok(v.clone()), |n| n.forward(v))
    }

    /// Spare columns for an input like `x`: see [`Linear::fused_rank`].
    pub fn fused_rank(&self, x: &Tensor) -> usize {
        self.inner().map(|l| l.fused_rank(x)).max().unwrap_or(0)
    }

    /// Whether the backward pass needs the input.
    pub fn needs_input(&self) -> bool {
        self.inner().any(Linear::needs_input)
    }

    /// Restores the activations dropped by [`Saved::drop_inputs`]: the input `x` if needed, and rotated
    /// queries and keys.
    pub fn restore(&self, s: &mut Saved, x: Option<&Tensor>, ctx: &Context) -> Result<()> {
        let linears = [Some(&self.q), self.k.as_ref(), self.v.as_ref()];
        for (l, s) in linears.into_iter().zip(&mut s.linears[..3]) {
            s.x = x.and_then(|x| l?.input(x));
        }
        if let (None, Some(before)) = (&s.rotated, &s.before_norm) {
            s.rotated = Some(self.rotated(before.clone(), ctx)?);
        }
        if let (None, Some(v)) = (&s.v, &s.v_before) {
            s.v = Some(self.normed_values(v)?);
        }
        Ok(())
    }

    /// Forward pass: `[t, d]` -> `[t, d]`. With a cache, queries also attend to cached tokens, and the new
    /// keys and values are appended.
    pub fn forward(&self, x: &Padded, ctx: &Context, cache: Option<&mut Cache>) -> Result<(Tensor, Saved)> {
        let (t, _) = x.dims();
        let c = self.head_dim;
        let low = self.stack.as_ref().map(|s| s.low(self.inner(), &x.values()?)).transpose()?;
        let mut low = low.into_iter().flatten();
        let mut project = |linear: &Linear| linear.forward_with(x, low.next(), ctx);
        let (mut joint, mut gate) = (None, None);
        let (q, qs) = if self.gated {
            let (y, saved) = project(&self.q)?;
            let (q, of_q) = gate::split(&y, self.heads)?;
            gate = Some(of_q);
            (q, saved)
        } else if self.joint {
            let (y, saved) = project(&self.q)?;
            let [q, k, v] = self.split(&y)?;
            joint = Some((k, v));
            (q, saved)
        } else {
            let (y, saved) = project(&self.q)?;
            (y.reshape((t, self.heads, c))?, saved)
        };
        let mut of = |linear: &Option<Linear>| -> Result<(Option<Tensor>, linear::Saved)> {
            let Some(linear) = linear else { return Ok((None, linear::Saved::default())) };
            let (y, saved) = project(linear)?;
            Ok((Some(y.reshape((t, self.kv_heads, c))?), saved))
        };
        let (mut k, ks) = of(&self.k)?;
        let (mut v, vs) = of(&self.v)?;
        if let Some(both) = joint {
            (k, v) = (Some(both.0), Some(both.1));
        }
        let v_before = v.or_else(|| k.clone());
        let before_norm = self.qk_norm.as_ref().map(|_| (q.clone(), k.clone()));
        let [q, k] = self.rotated((q, k), ctx)?;
        let v = match (&v_before, self.producer) {
            (Some(v), _) => self.normed_values(v)?,
            (None, Some(l)) => ctx.shared_state.keys(l)?[1].clone(),
            (None, None) => candle_core::bail!("attention without values"),
        };
        if self.lends {
            ctx.shared_state.lend_keys(self.layer, [k.clone(), v.clone()]);
        }
        let v_before = v_before.filter(|_| self.v_norm.is_some());
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
        let (linears, rotated, v) = ([qs, ks, vs, os], Some([q, k]), Some(v));
        Ok((y, Saved { linears, before_norm, v_before, rotated, v, out, gate }))
    }

    /// Backward pass: returns the gradient of the input.
    pub fn backward(
        &self,
        s: Saved,
        dy: &Padded,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
    ) -> Result<Tensor> {
        let (t, _) = dy.dims();
        let c = self.head_dim;
        let [qs, ks, vs, mut os] = s.linears;
        let (Some([q, k]), Some(v)) = (s.rotated, s.v) else {
            candle_core::bail!("backward without queries, keys and values")
        };
        if let Some(gate) = s.gate.as_ref().filter(|_| self.o.needs_input()) {
            os.x = Some(gate::forward(&s.out.o, gate)?);
        }
        let d_o = self.o.backward_padded(&os, dy, ctx, accum, None)?;
        let (d_o, d_gate) = match s.gate {
            None => (d_o, None),
            Some(gate) => {
                let (d_o, d_gate) = gate::backward(&s.out.o, &gate, &d_o)?;
                (d_o, Some(d_gate))
            }
        };
        let d_o = d_o.reshape((t, self.heads, c))?;
        let rank = |l: &Option<Linear>| l.as_ref().map_or(0, |l| l.fused_rank_back(&d_o, ctx));
        let (rq, rk) = (self.q.fused_rank_back(&d_o, ctx), if self.v.is_some() { rank(&self.k) } else { 0 });
        let stack = self.stack.as_ref().filter(|s| s.trains(self.inner(), &d_o));
        let (rq, rk) =
            if self.rotates_neighbors || self.joint || stack.is_some() { (0, 0) } else { (rq, rk) };
        let rv = match stack {
            _ if self.v.is_none() || self.v_norm.is_some() || self.lends => 0,
            Some(stack) => stack.all(),
            None => rank(&self.v),
        };
        if let Some((sinks, slot)) = self.sinks.as_ref().and_then(|s| Some((&s.value, s.slot?))) {
            let sinks = sinks.to_dtype(q.dtype())?;
            for (rows, part) in s.out.parts() {
                let d_o = d_o.narrow(0, rows.start, rows.len())?;
                accum.column_sums(slot, &sinks::backward(part, &sinks, &d_o)?)?;
            }
        }
        let (how, out) = (self.causal(ctx), s.out);
        let (dq, dk, dv) = match &ctx.context_parallel {
            Some(context_parallel) => context_parallel.backward([&q, &k, &v, &d_o], out, &how, rv)?,
            None => {
                let gradients = attention::backward(&q, &k, &v, out.whole()?, &d_o, &how, rv)?;
                drop(out);
                gradients
            }
        };
        drop((d_o, q, k, v, os));
        let rq = if d_gate.is_some() { 0 } else { rq };
        let kept = (s.before_norm, s.v_before);
        let (dq, d_keys) = self.projected_back(kept, [dq, dk], dv, ctx, [rq, rk], accum)?;
        let dq = match d_gate {
            None => dq,
            Some(d_gate) => gate::join(&dq, &d_gate, self.heads)?,
        };
        self.input_back([&qs, &ks, &vs], dq, d_keys, stack, (ctx, accum))
    }

    /// Gradient of the input from gradients of queries, keys and values.
    fn input_back(
        &self,
        [qs, ks, vs]: [&linear::Saved; 3],
        dq: Padded,
        d_keys: Option<[Padded; 2]>,
        stack: Option<&Stack>,
        (ctx, accum): (&Context, &GradAccumulator<'_>),
    ) -> Result<Tensor> {
        if let (true, Some([dk, dv])) = (self.joint, &d_keys) {
            let all = Padded::of(&Tensor::cat(&[dq.values()?, dk.values()?, dv.values()?], 1)?)?;
            drop((dq, d_keys));
            return self.q.backward_padded(qs, &all, ctx, accum, None);
        }
        let others = d_keys.map(|[dk, dv]| [(&self.k, ks, dk), (&self.v, vs, dv)]).into_iter().flatten();
        if let Some(stack) = stack {
            let others = others.filter_map(|(linear, saved, d)| Some((linear.as_ref()?, saved, d)));
            return stack.backward(std::iter::once((&self.q, qs, dq)).chain(others).collect(), accum);
        }
        let mut dx = self.q.backward_padded(qs, &dq, ctx, accum, None)?;
        drop(dq);
        for (linear, saved, d) in others {
            if let Some(linear) = linear {
                dx = linear.backward_padded(saved, &d, ctx, accum, Some(dx))?;
            }
        }
        Ok(dx)
    }

    /// Gradients of the projections from the gradients of queries, keys and values. Gradients of keys and values of an
    /// earlier layer go to that layer.
    fn projected_back(
        &self,
        (before, v_before): (Option<Projected>, Option<Tensor>),
        [dq, dk]: [Tensor; 2],
        dv: Padded,
        ctx: &Context,
        ranks: [usize; 2],
        accum: &GradAccumulator<'_>,
    ) -> Result<(Padded, Option<[Padded; 2]>)> {
        if let Some(producer) = self.producer {
            let (dv, one) = (dv.values()?.reshape(dk.shape())?, |x: &Tensor| x.narrow(1, 0, 1)?.contiguous());
            ctx.shared_state.give_keys(producer, [dk, dv])?;
            let before = before.map(|(q, _)| Ok::<_, candle_core::Error>([one(&q)?, q])).transpose()?;
            let before = before.map(|[stand_in, q]| [q, stand_in]);
            let d_one = one(&dq)?;
            let [dq, _] = self.rotated_back(before.as_ref(), [dq, d_one], ctx, [ranks[0], 0], accum)?;
            return Ok((dq, None));
        }
        let (mut dk, mut dv) = (dk, dv);
        if let Some([of_k, of_v]) = self.lends.then(|| ctx.shared_state.take_keys(self.layer)).flatten() {
            dv = Padded::of(&(dv.values()? + flat(&of_v)?)?)?;
            dk = (dk + of_k)?;
        }
        if let (Some(norm), Some(v)) = (&self.v_norm, v_before) {
            dv = Padded::of(&flat(&norm.backward(&v, &dv.values()?.reshape(v.shape())?, accum)?)?)?;
        }
        let before = before.and_then(|(q, k)| Some([q, k?]));
        let [dq, mut dk] = self.rotated_back(before.as_ref(), [dq, dk], ctx, ranks, accum)?;
        if self.v.is_none() && !self.joint {
            dk = Padded::of(&(dk.values()? + dv.values()?)?)?;
        }
        Ok((dq, Some([dk, dv])))
    }
}
