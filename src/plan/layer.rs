//! The layer's forward and backward as allocations: `model/{linear,attention,mlp,layer}.rs`, line by line; a mixture's
//! are in [`super::mixture`].
//!
//! A change of what lives how long there has its counterpart here; `tests/cli/plan.rs` compares the two on real runs.

use super::ledger::{Component, Held};
use super::ops::{Attend, Ops, cuda_panel};
use super::shape::{Ffn, Layer, Linear};
use crate::walk::Decoded;
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
    /// How 4-bit weights are decoded.
    pub decoded: Decoded,
    /// Whether all tokens choose the same experts, or as many each.
    pub skewed: bool,
}

impl Sim<'_> {
    /// `Layer::decoded`: the 4-bit matrices of a layer that is decoded for the visit.
    pub fn visited(&self, layer: &Layer) -> Vec<Held> {
        let m = self.ops.machine;
        let decode = |(l, count): (&Linear, u64)| {
            let held = self.ops.tensor(Component::InFlight, count * l.weight());
            // made in f32 and rounded, one after the other
            let wide = if m.cuda || m.wide() { 0 } else { l.weight() };
            drop(self.ops.f32(Workspace, wide));
            held
        };
        match self.decoded {
            Decoded::Panels => Vec::new(),
            Decoded::Visit => layer.linears().filter(|(l, _)| l.nf4).map(decode).collect(),
        }
    }

    /// A product with a 4-bit matrix, [n, k] x [k, o]: what is decoded of it, or it is decoded already.
    fn packed(&self, c: Component, (n, k, o): (u64, u64, u64), backward: bool) -> Held {
        let panels = self.decoded == Decoded::Panels;
        if self.ops.machine.cuda {
            let panel = if panels { cuda_panel(self.ops.machine.width * k * o) } else { 0 };
            let _w = self.ops.ledger.hold(Component::InFlight, panel);
            return self.ops.matmul(c, n, k, o);
        }
        self.ops.by_panels(c, (n, k, o), panels, backward)
    }

    fn weight_forward(&self, l: &Linear, c: Component, n: u64) -> Held {
        if l.nf4 { self.packed(c, (n, l.i, l.o), false) } else { self.ops.matmul(c, n, l.i, l.o) }
    }

    fn weight_backward(&self, l: &Linear, n: u64, dx: Option<Held>) -> Held {
        if l.nf4 {
            let sizes = (n, l.o, l.i);
            let Some(dx) = dx else { return self.packed(Workspace, sizes, true) };
            if !self.ops.machine.cuda && self.ops.machine.wide() {
                self.ops.panels(sizes, self.decoded == Decoded::Panels, true);
                return dx;
            }
            let _own = self.packed(Workspace, sizes, true);
            return self.ops.tensor(Workspace, n * l.i);
        }
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
                let _cross = if l.nf4 {
                    let _product = self.packed(Workspace, (l.rank, l.i, l.o), false);
                    self.ops.tensor(Workspace, l.o * l.rank)
                } else {
                    self.ops.matmul(Workspace, l.o, l.i, l.rank)
                };
                let _product = self.ops.f32(Workspace, l.o * l.rank);
            }
            let y = if self.ops.machine.wide() {
                let mut y = self.ops.tensor(c, n * l.o);
                if masked {
                    let again = self.weight_forward(l, Workspace, n);
                    let sum = self.ops.tensor(Workspace, n * l.o);
                    drop(again);
                    y = self.ops.tensor(c, n * l.o);
                    drop(sum);
                }
                y
            } else {
                // in f32, and rounded at the end
                let _sum = self.ops.f32(Workspace, n * l.o);
                if masked {
                    let _terms = self.ops.f32(Workspace, 3 * n * l.o);
                    let _again = self.weight_forward(l, Workspace, n);
                } else {
                    let _z = self.ops.f32(Workspace, n * l.o);
                }
                self.ops.tensor(c, n * l.o)
            };
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
        let mut _du = self.ops.matmul(Workspace, n, l.o, l.rank);
        if self.ops.machine.wide() {
            _du = self.ops.tensor(Workspace, n * l.rank);
        }
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
            let difference = (!self.ops.machine.wide()).then(|| self.ops.f32(Workspace, 2 * n * l.o));
            let _difference = self.ops.tensor(Workspace, n * l.o);
            drop(difference);
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
    pub(super) fn mlp_backward(&self, [lg, lu, ld]: &[Linear; 3], s: MlpSaved) -> Held {
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
