//! The layer's forward and backward as allocations: `model/{linear,attention,mlp,layer}.rs`, line by line.
//!
//! A change of what lives how long there has its counterpart here; `tests/cli/plan.rs` compares the two on real runs.

use super::ledger::{Component, Held};
use super::ops::{Attend, Ops};
use super::shape::{Ffn, Layer, Linear};
use Component::Workspace;

/// What depends on the micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Tokens of a micro-batch.
    pub tokens: u64,
    /// Supervised targets among them.
    pub targets: u64,
    /// Longest document.
    pub longest: u64,
    /// Most keys that 64 queries in a row see: theirs and those of documents between.
    pub reach: u64,
}

/// Saved by a linear.
#[derive(Debug, Default)]
pub struct LinearSaved {
    x: Option<Held>,
    u: Option<Held>,
    dora: Option<Held>,
}

/// Saved by an attention block.
#[derive(Debug)]
pub struct AttentionSaved {
    linears: [LinearSaved; 4],
    before_norm: Option<(Held, Held)>,
    q: Held,
    k: Held,
    v: Held,
    out: (Held, Held),
}

/// Saved by a dense block, or a shared expert.
#[derive(Debug)]
pub struct MlpSaved {
    /// Of gate, up and down.
    linears: [LinearSaved; 3],
    /// Gate's and up's outputs.
    gate_up: (Held, Held),
}

/// Saved by a feed-forward block.
#[derive(Debug)]
pub enum FfnSaved {
    /// A dense one.
    Dense(MlpSaved),
    /// A mixture.
    Experts {
        /// The input, where the router trains.
        x: Option<Held>,
        /// Rows of the input by expert, where experts train.
        rows: Option<Held>,
        /// Of each kind of expert: gate's and up's outputs, LoRA's inner values.
        kept: Vec<Held>,
        /// Experts' outputs, which the gates' gradients need.
        out: Vec<Held>,
        /// Probabilities, gates and who goes where.
        routes: Held,
        /// Of the shared expert: its block, its gate, its output.
        shared: Option<Box<(MlpSaved, LinearSaved, Held)>>,
    },
}

/// Saved by a layer.
#[derive(Debug)]
pub struct Saved {
    x: Held,
    mid: Held,
    attention: AttentionSaved,
    ffn: FfnSaved,
}

/// The mathematics of a layer on a ledger.
#[derive(Clone, Debug)]
pub struct Sim<'a> {
    /// Operations.
    pub ops: &'a Ops,
    /// The micro-batch.
    pub t: Tokens,
    /// Width of the model.
    pub d: u64,
    /// Query heads, key/value heads, channels.
    pub heads: (u64, u64, u64),
    /// Whether this is training (dropout, saved inputs).
    pub train: bool,
}

impl Sim<'_> {
    /// A decoded weight, while it is used.
    fn decoded(&self, l: &Linear) -> Option<Held> {
        l.nf4.then(|| self.ops.tensor(Component::InFlight, l.weight()))
    }

    fn weight_forward(&self, l: &Linear, c: Component, n: u64) -> Held {
        let _w = self.decoded(l);
        self.ops.matmul(c, n, l.i, l.o)
    }

    fn weight_backward(&self, l: &Linear, n: u64, dx: Option<Held>) -> Held {
        let _w = self.decoded(l);
        match dx {
            None => self.ops.matmul(Workspace, n, l.o, l.i),
            Some(dx) => {
                self.ops.matmul_acc(n, l.o, l.i, false);
                dx
            }
        }
    }

    fn add_bias(&self, l: &Linear, c: Component, n: u64, y: Held) -> Held {
        if l.bias { self.ops.tensor(c, n * l.o) } else { y }
    }

    /// `Linear::forward` of `n` rows.
    pub fn linear(&self, l: &Linear, c: Component, n: u64, x: &Held) -> (Held, LinearSaved) {
        let mut saved =
            LinearSaved { x: (self.train && l.needs_input()).then(|| x.clone()), ..Default::default() };
        if l.rank == 0 {
            let y = self.weight_forward(l, c, n);
            return (self.add_bias(l, c, n, y), saved);
        }
        let masked = self.train && l.dropout;
        let mask = masked.then(|| self.ops.dropout_mask(n, l.i));
        let _dropped = masked.then(|| self.ops.tensor(Workspace, n * l.i));
        let u = self.ops.matmul(c, n, l.i, l.rank);
        let y = if l.dora {
            let base = self.weight_forward(l, Workspace, n);
            let z = self.ops.tensor(c, n * l.o);
            self.ops.matmul_acc(n, l.rank, l.o, false);
            {
                let _wide =
                    (!self.ops.machine.wide()).then(|| self.ops.f32(Workspace, l.rank * (l.i + 2 * l.o)));
                let _w = self.decoded(l);
                let _cross = self.ops.matmul(Workspace, l.o, l.i, l.rank);
                let _product = self.ops.f32(Workspace, l.o * l.rank);
            }
            let mut y = self.ops.tensor(c, n * l.o);
            if masked {
                let again = self.weight_forward(l, Workspace, n);
                let sum = self.ops.tensor(Workspace, n * l.o);
                drop(again);
                y = self.ops.tensor(c, n * l.o);
                drop(sum);
            }
            drop(base);
            saved.dora = self.train.then_some(z);
            self.add_bias(l, c, n, y)
        } else {
            let y = self.weight_forward(l, c, n);
            let y = self.add_bias(l, c, n, y);
            self.ops.matmul_acc(n, l.rank, l.o, false);
            y
        };
        drop(mask);
        saved.u = self.train.then_some(u);
        (y, saved)
    }

    /// `Linear::backward` of `n` rows.
    pub fn linear_backward(&self, l: &Linear, n: u64, saved: &LinearSaved, dx: Option<Held>) -> Held {
        if l.full {
            if l.bias && !self.ops.machine.wide() {
                let _wide = self.ops.f32(Workspace, n * l.o);
            }
            self.ops.matmul_acc(l.o, n, l.i, true);
        }
        if l.rank == 0 {
            return self.weight_backward(l, n, dx);
        }
        let mask = l.dropout.then(|| self.ops.dropout_mask(n, l.i));
        let dz = saved.dora.is_some().then(|| {
            {
                let _wide = self.ops.f32(Workspace, n * l.o);
                let _cast = (!self.ops.machine.wide()).then(|| self.ops.f32(Workspace, 2 * n * l.o));
            }
            self.ops.tensor(Workspace, n * l.o)
        });
        let _du = {
            let _unscaled = self.ops.matmul(Workspace, n, l.o, l.rank);
            self.ops.tensor(Workspace, n * l.rank)
        };
        self.ops.matmul_acc(l.o, n, l.rank, true);
        if mask.is_none() {
            self.ops.matmul_acc(l.rank, n, l.i, true);
            let dx = self.weight_backward(l, n, dx);
            self.ops.matmul_acc(n, l.rank, l.i, false);
            return dx;
        }
        {
            let _dropped = self.ops.tensor(Workspace, n * l.i);
            self.ops.matmul_acc(l.rank, n, l.i, true);
        }
        let mut dxd = self.ops.matmul(Workspace, n, l.rank, l.i);
        if dz.is_some() {
            let _difference = self.ops.tensor(Workspace, n * l.o);
            dxd = self.weight_backward(l, n, Some(dxd));
        }
        let dx = self.weight_backward(l, n, dx);
        let _masked = self.ops.tensor(Workspace, n * l.i);
        drop(dxd);
        let out = self.ops.tensor(Workspace, n * l.i);
        drop(dx);
        out
    }

    fn attend(&self, layer: &Layer) -> Attend {
        let (heads, kv_heads, head_dim) = self.heads;
        let cap = |n: u64| layer.window.map_or(n, |w| n.min(w + 64));
        Attend {
            tokens: self.t.tokens,
            heads,
            kv_heads,
            head_dim,
            longest: self.t.longest,
            keys_seen: cap(self.t.reach),
        }
    }

    fn attention(&self, layer: &Layer, c: Component, x: &Held) -> (Held, AttentionSaved) {
        let t = self.t.tokens;
        let (h, g, hd) = self.heads;
        let [lq, lk, lv, lo] = &layer.attention;
        let (mut q, qs) = self.linear(lq, c, t, x);
        let (mut k, ks) = self.linear(lk, c, t, x);
        let (v, vs) = self.linear(lv, c, t, x);
        let mut before_norm = None;
        if layer.qk_norm {
            let (nq, nk) = (self.ops.norm(c, t * h, hd), self.ops.norm(c, t * g, hd));
            before_norm = Some((q, k));
            (q, k) = (nq, nk);
        }
        q = {
            let _old = q;
            self.ops.rope(c, t * h * hd)
        };
        k = {
            let _old = k;
            self.ops.rope(c, t * g * hd)
        };
        let out = self.ops.attention(c, &self.attend(layer));
        let (y, os) = self.linear(lo, Workspace, t, &out.0);
        (y, AttentionSaved { linears: [qs, ks, vs, os], before_norm, q, k, v, out })
    }

    fn attention_backward(&self, layer: &Layer, s: AttentionSaved) -> Held {
        let t = self.t.tokens;
        let (h, g, hd) = self.heads;
        let [lq, lk, lv, lo] = &layer.attention;
        let [qs, ks, vs, os] = s.linears;
        let d_o = self.linear_backward(lo, t, &os, None);
        let (mut dq, mut dk, dv) = self.ops.attention_backward(&self.attend(layer));
        drop((d_o, s.q, s.k, s.v, s.out, os));
        dq = {
            let _old = dq;
            self.ops.rope(Workspace, t * h * hd)
        };
        dk = {
            let _old = dk;
            self.ops.rope(Workspace, t * g * hd)
        };
        if s.before_norm.is_some() {
            dq = {
                let _old = dq;
                self.ops.norm_backward(t * h, hd)
            };
            dk = {
                let _old = dk;
                self.ops.norm_backward(t * g, hd)
            };
        }
        drop(s.before_norm);
        let dx = self.linear_backward(lq, t, &qs, None);
        let dx = self.linear_backward(lk, t, &ks, Some(dx));
        let dx = self.linear_backward(lv, t, &vs, Some(dx));
        drop((dq, dk, dv));
        dx
    }

    fn ffn(&self, layer: &Layer, c: Component, x: &Held) -> (Held, FfnSaved) {
        match &layer.ffn {
            Ffn::Dense(three) => {
                let (y, saved) = self.mlp(three, c, x);
                (y, FfnSaved::Dense(saved))
            }
            Ffn::Experts { router, experts, shared, top_k } => {
                let (mut y, mut saved) = self.mixture(router, experts, *top_k, c, x);
                if let (Some((three, gate)), FfnSaved::Experts { shared, .. }) = (shared, &mut saved) {
                    let n = self.t.tokens * self.d;
                    let (out, mlp) = self.mlp(three, c, x);
                    // the same tensor, counted as what is kept
                    drop(out);
                    let kept = self.ops.tensor(c, n);
                    let (logit, gate) = self.linear(gate, Workspace, self.t.tokens, x);
                    drop(logit);
                    let more = self.ops.tensor(Workspace, n);
                    let sum = self.ops.tensor(Workspace, n);
                    drop(more);
                    y = sum;
                    *shared = Some(Box::new((mlp, gate, kept)));
                }
                (y, saved)
            }
        }
    }

    /// `Mlp::forward`.
    fn mlp(&self, [lg, lu, ld]: &[Linear; 3], c: Component, x: &Held) -> (Held, MlpSaved) {
        let t = self.t.tokens;
        let (gate, gs) = self.linear(lg, c, t, x);
        let (up, us) = self.linear(lu, c, t, x);
        let h = self.ops.swiglu(Workspace, t * lg.o);
        let (y, mut ds) = self.linear(ld, Workspace, t, &h);
        ds.x = None;
        (y, MlpSaved { linears: [gs, us, ds], gate_up: (gate, up) })
    }

    /// `Mlp::backward`.
    fn mlp_backward(&self, [lg, lu, ld]: &[Linear; 3], s: MlpSaved) -> Held {
        let MlpSaved { linears: [gs, us, ds], gate_up } = s;
        let t = self.t.tokens;
        let h = ld.needs_input().then(|| self.ops.swiglu(Workspace, t * lg.o));
        let dh = self.linear_backward(ld, t, &ds, None);
        drop((h, ds));
        let (dg, du) = self.ops.swiglu_backward(t * lg.o);
        drop((dh, gate_up));
        let dx = self.linear_backward(lg, t, &gs, None);
        let dx = self.linear_backward(lu, t, &us, Some(dx));
        drop((dg, du));
        dx
    }

    fn ffn_backward(&self, layer: &Layer, s: FfnSaved) -> Held {
        match (&layer.ffn, s) {
            (Ffn::Dense(three), FfnSaved::Dense(s)) => self.mlp_backward(three, s),
            (Ffn::Experts { router, experts, shared, top_k }, s) => {
                self.mixture_backward(router, experts, shared.as_ref(), *top_k, s)
            }
            (Ffn::Dense(_), s) => {
                drop(s);
                self.ops.tensor(Workspace, self.t.tokens * self.d)
            }
        }
    }

    /// Experts that are computed at once: `kernel::group::side_by_side` on the CPU.
    fn at_once(&self, experts: u64) -> Option<u64> {
        let m = self.ops.machine;
        (!m.cuda && m.threads > 1 && experts >= 2 * m.threads).then_some(m.threads)
    }

    /// `Mixture::forward`, with the tokens spread over the experts evenly.
    fn mixture(
        &self,
        router: &Linear,
        experts: &[([Linear; 3], u64)],
        top_k: u64,
        c: Component,
        x: &Held,
    ) -> (Held, FfnSaved) {
        let (t, e, d, ops) = (self.t.tokens, router.o.max(1), self.d, self.ops);
        let rows = t * top_k;
        let wide_x = (!ops.machine.wide()).then(|| ops.f32(c, t * d));
        let _logits = ops.f32(Workspace, t * e);
        // probabilities, logarithms of sums, gates, and four numbers a pair
        let routes = ops.f32(c, t * e + t + rows + 4 * rows);
        let wide_x = if self.train && router.needs_input() { wide_x.or(Some(x.clone())) } else { None };
        let gathered = ops.tensor(c, rows * d);
        let (mut kept, mut out) = (Vec::new(), Vec::new());
        let running = self.at_once(e).unwrap_or(1);
        let each = rows.div_ceil(e);
        for (three, count) in experts {
            let (n, width) = (rows * count / e, three[0].o);
            kept.push(ops.tensor(c, 2 * n * width));
            let inner: u64 = three.iter().map(|l| n * l.rank).sum();
            kept.push(ops.tensor(c, if self.train { inner } else { 0 }));
            out.push(ops.tensor(c, n * d));
            let _decoded = self.decoded_at_once(three, running);
            ops.tensor(Workspace, running.min(*count) * each * width);
        }
        let y = self.combine(rows, Workspace);
        let trains = experts.iter().flat_map(|(e, _)| e).any(Linear::needs_input);
        let gathered = (self.train && trains).then_some(gathered);
        (y, FfnSaved::Experts { x: wide_x, rows: gathered, kept, out, routes, shared: None })
    }

    /// Sum of the experts' rows for each token; on CUDA they are put together first.
    fn combine(&self, rows: u64, c: Component) -> Held {
        let together = if self.ops.machine.cuda { rows * self.d } else { 0 };
        let _all = self.ops.tensor(Workspace, 2 * together);
        let _wide = self.ops.f32(Workspace, 2 * together);
        let _rounded = (!self.ops.machine.wide()).then(|| self.ops.f32(Workspace, rows * self.d));
        self.ops.tensor(c, self.t.tokens * self.d)
    }

    /// Decoded weights of the experts that are at work: one matrix each.
    fn decoded_at_once(&self, three: &[Linear; 3], running: u64) -> Held {
        let largest = three.iter().filter(|l| l.nf4).map(Linear::weight).max().unwrap_or(0);
        self.ops.tensor(Component::InFlight, running * largest)
    }

    /// `Mixture::backward`.
    fn mixture_backward(
        &self,
        router: &Linear,
        experts: &[([Linear; 3], u64)],
        shared: Option<&([Linear; 3], Linear)>,
        top_k: u64,
        s: FfnSaved,
    ) -> Held {
        let FfnSaved::Experts { x, rows: gathered, kept, out, routes, shared: shared_saved } = s else {
            return self.ops.tensor(Workspace, self.t.tokens * self.d);
        };
        let (t, e, d, ops) = (self.t.tokens, router.o.max(1), self.d, self.ops);
        let rows = t * top_k;
        let _d_gates = ops.f32(Workspace, rows);
        drop(out);
        let side = self.at_once(e);
        let running = side.unwrap_or(1);
        let each = rows.div_ceil(e);
        let (mut parts, mut collected) = (Vec::new(), Vec::new());
        let mut kept = kept.into_iter();
        for (three, count) in experts {
            let [gate, up, down] = three;
            let (n, width) = (rows * count / e, gate.o);
            let again = if down.needs_input() { width } else { 0 };
            let widen = if ops.machine.wide() { 0 } else { 3 * width };
            // at the gradients of gate and up: the gates' rows, the inner product, three more of its size
            let busy = running.min(*count) * each * (d + again + 3 * width);
            let busy =
                || (ops.tensor(Workspace, busy), ops.f32(Workspace, running.min(*count) * each * widen));
            // what the first expert of these meets
            let decoded = self.decoded_at_once(three, running);
            drop(busy());
            drop((kept.next(), kept.next()));
            if side.is_some() {
                // products wait with their operands until all experts are done
                let down_waits = if down.needs_input() { d + width } else { 0 };
                let waits = |l: &Linear| if l.needs_input() { width } else { 0 };
                let inner: u64 = three.iter().map(|l| 2 * l.rank).sum();
                collected.push(ops.tensor(Workspace, n * (down_waits + waits(gate) + waits(up) + inner)));
            } else {
                for l in three.iter().filter(|l| l.full) {
                    ops.matmul_acc(l.o, each, l.i, true);
                }
            }
            // and the last: all others have left theirs
            parts.push(ops.tensor(Workspace, n * d));
            drop((busy(), decoded));
        }
        drop((gathered, collected));
        let mut dx = self.combine(rows, Workspace);
        if let (Some((three, gate)), Some(saved)) = (shared, shared_saved) {
            let (mlp, gate_saved, out) = *saved;
            {
                let _wide = (!ops.machine.wide()).then(|| ops.f32(Workspace, 2 * t * d));
                let _product = ops.f32(Workspace, t * d);
            }
            drop(out);
            let d_out = ops.tensor(Workspace, t * d);
            let d_shared = self.mlp_backward(three, mlp);
            let d_shared = self.linear_backward(gate, t, &gate_saved, Some(d_shared));
            let sum = ops.tensor(Workspace, t * d);
            drop((d_out, d_shared));
            dx = sum;
        }
        let _d_logits = ops.f32(Workspace, t * e);
        if router.full {
            ops.matmul_acc(router.o, t, router.i, true);
        }
        let _own = ops.f32(Workspace, t * d);
        let sum = ops.tensor(Workspace, t * d);
        drop((dx, parts, x, routes));
        sum
    }

    /// `Layer::forward`. What is saved counts as `c`.
    pub fn layer(&self, layer: &Layer, c: Component, x: &Held) -> (Held, Saved) {
        let n = self.t.tokens * self.d;
        let (a, attention) = {
            let normed = self.ops.norm(c, self.t.tokens, self.d);
            self.attention(layer, c, &normed)
        };
        let mid = self.ops.tensor(c, n);
        drop(a);
        let (m, ffn) = {
            let normed = self.ops.norm(c, self.t.tokens, self.d);
            self.ffn(layer, c, &normed)
        };
        let y = self.ops.tensor(Component::Activations, n);
        drop(m);
        (y, Saved { x: x.clone(), mid, attention, ffn })
    }

    /// `Layer::backward`.
    pub fn layer_backward(&self, layer: &Layer, s: Saved) -> Held {
        let n = self.t.tokens * self.d;
        let d_mid = {
            let _dn = self.ffn_backward(layer, s.ffn);
            let _norm = self.ops.norm_backward(self.t.tokens, self.d);
            self.ops.tensor(Workspace, n)
        };
        drop(s.mid);
        let dn = self.attention_backward(layer, s.attention);
        let norm = self.ops.norm_backward(self.t.tokens, self.d);
        let dx = self.ops.tensor(Workspace, n);
        drop((dn, norm, d_mid, s.x));
        dx
    }
}
