//! A mixture's forward and backward as allocations: `model/moe.rs`, with the tokens spread over the experts evenly, or
//! (`skewed`) all of them to the same ones.

use super::layer::{FfnSaved, Sim};
use super::ledger::{Component, Held};
use super::ops::{cuda_panel, panel};
use super::shape::Linear;
use crate::walk::Decoded;
use Component::Workspace;

impl Sim<'_> {
    /// Experts that are computed at once: `kernel::group::side_by_side` on the CPU.
    fn at_once(&self, experts: u64) -> Option<u64> {
        let m = self.ops.machine;
        (!m.cuda && m.threads > 1 && experts >= 2 * m.threads).then_some(m.threads)
    }

    /// Rows of the experts that are at work, `running` at once of `e`.
    fn busy_rows(&self, rows: u64, e: u64, running: u64) -> u64 {
        // no token chooses an expert twice
        if self.skewed { rows.min(running * self.t.tokens) } else { running * rows.div_ceil(e) }
    }

    /// Values a row that DoRA and dropout take of an expert while it is at work: a product without LoRA; a mask with
    /// what it leaves.
    fn beside(&self, three: &[Linear; 3]) -> (u64, u64) {
        let most = |values: &dyn Fn(&Linear) -> u64| three.iter().map(values).max().unwrap_or(0);
        let dora = most(&|l| if l.dora { l.o } else { 0 });
        (dora, most(&|l| if l.dropout && self.train { 2 * l.i } else { 0 }))
    }

    /// Rows of each kind of expert; where routing is skewed they go where most is kept of a row.
    fn spread(&self, experts: &[([Linear; 3], u64)], rows: u64, e: u64) -> Vec<u64> {
        if !self.skewed {
            return experts.iter().map(|(_, count)| rows * count / e).collect();
        }
        let kept = |l: &Linear| l.rank + if l.needs_input() { l.i + l.o } else { 0 };
        let mut order: Vec<usize> = (0..experts.len()).collect();
        order.sort_by_key(|g| std::cmp::Reverse(experts[*g].0.iter().map(kept).sum::<u64>()));
        let (mut out, mut left) = (vec![0; experts.len()], rows);
        for g in order {
            out[g] = left.min(experts[g].1 * self.t.tokens);
            left -= out[g];
        }
        out
    }

    /// `Mixture::forward`.
    pub(super) fn mixture(
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
        for ((three, count), n) in experts.iter().zip(self.spread(experts, rows, e)) {
            let width = three[0].o;
            kept.push(ops.tensor(c, 2 * n * width));
            // LoRA's inner values, and of DoRA what its gain scales
            let inner: u64 = three.iter().map(|l| n * (l.rank + if l.dora { l.o } else { 0 })).sum();
            kept.push(ops.tensor(c, if self.train { inner } else { 0 }));
            out.push(ops.tensor(c, n * d));
            let _decoded = self.decoded_at_once(three);
            let (dora, masked) = self.beside(three);
            ops.tensor(Workspace, self.busy_rows(rows, e, running.min(*count)) * (width + dora + masked));
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

    /// What is decoded of the experts that are at work: on the CPU a panel a thread, else one panel.
    fn decoded_at_once(&self, three: &[Linear; 3]) -> Held {
        let m = self.ops.machine;
        let bytes = |l: &Linear| match (m.cuda, self.decoded) {
            (true, Decoded::Panels) => cuda_panel(m.width * l.weight()),
            (false, Decoded::Panels) => m.threads * panel(l.i, l.o).max(panel(l.o, l.i)),
            // what is decoded already is widened whole
            (false, Decoded::Visit) if !m.wide() => m.threads * 4 * l.weight(),
            (_, Decoded::Visit) => 0,
        };
        let most = three.iter().filter(|l| l.nf4).map(bytes).max().unwrap_or(0);
        self.ops.ledger.hold(Component::InFlight, most)
    }

    /// `Mixture::backward`.
    pub(super) fn mixture_backward(
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
        let (mut parts, mut collected) = (Vec::new(), Vec::new());
        let mut kept = kept.into_iter();
        for ((three, count), n) in experts.iter().zip(self.spread(experts, rows, e)) {
            let [gate, up, down] = three;
            let width = gate.o;
            let again = if down.needs_input() { width } else { 0 };
            let widen = if ops.machine.wide() { 0 } else { 3 * width };
            // at the gradients of gate and up: the gates' rows, the inner product, three more of its size
            let at_work = self.busy_rows(rows, e, running.min(*count));
            let (dora, masked) = self.beside(three);
            let busy = at_work * (d + again + 3 * width + 2 * dora + masked);
            let busy = || (ops.tensor(Workspace, busy), ops.f32(Workspace, at_work * widen));
            // what the first expert of these meets
            let decoded = self.decoded_at_once(three);
            drop(busy());
            drop((kept.next(), kept.next()));
            if side.is_some() {
                // products wait with their operands until all experts are done
                let down_waits = if down.needs_input() { d + width } else { 0 };
                let waits = |l: &Linear| if l.needs_input() { width } else { 0 };
                let inner: u64 = three.iter().map(|l| 2 * l.rank).sum();
                // the input of gate and up with what was dropped
                let dropped: u64 = [gate, up].iter().filter(|l| l.dropout).map(|l| l.i).sum();
                collected.push(
                    ops.tensor(Workspace, n * (down_waits + waits(gate) + waits(up) + inner + dropped)),
                );
            } else {
                for l in three.iter().filter(|l| l.full) {
                    ops.matmul_acc(l.o, self.busy_rows(rows, e, 1), l.i, true);
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
}
