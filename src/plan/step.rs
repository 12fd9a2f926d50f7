//! A whole run as allocations: loading, the walk of a step, the optimizer, evaluation, saving.
//!
//! Mirrors `adapt/{params,build}.rs`, `walk/mod.rs`, `model/head.rs` and `train/step.rs`.

use super::layer::{Saved, Sim, Tokens};
use super::ledger::{Component, Held, Phase};
use super::ops::{Machine, Ops, chunk_rows};
use super::shape::Shape;
use super::statics::Statics;
use Component::Workspace;

/// Kept of a layer between forward and backward, as in `walk`.
enum Kept {
    Nothing,
    /// `None`: it lives on the host.
    Input(Option<Held>),
    All(Box<Saved>),
}

/// What a run is simulated with.
#[derive(Clone, Debug)]
pub struct Run<'a> {
    /// Sizes of the model.
    pub shape: &'a Shape,
    /// What stays all the time.
    pub statics: &'a Statics,
    /// Where.
    pub machine: Machine,
    /// A training micro-batch.
    pub train: Tokens,
    /// An evaluation micro-batch, if the recipe evaluates.
    pub eval: Option<Tokens>,
    /// Layers that are recomputed, from the lowest that is walked backward.
    pub recompute: usize,
    /// Whether kept activations live on the host.
    pub activations_on_host: bool,
    /// Pipeline stages: that many micro-batches are between forward and backward at once.
    pub stages: u64,
}

impl Run<'_> {
    /// Goes through the run; the ledger of the operations has the peak then.
    pub fn simulate(&self, ops: &Ops) {
        let ledger = &ops.ledger;
        ledger.at(Phase::Load, 0);
        let mut held: Vec<Held> =
            self.statics.device.iter().map(|(c, bytes)| ledger.hold(c, bytes)).collect();
        drop(ledger.hold(Workspace, self.statics.load_transient));
        self.step(ops);
        ledger.at(Phase::Step, 0);
        ops.adamw(self.statics.largest_stretch);
        drop(ledger.hold(Workspace, self.statics.step_transient));
        drop(ledger.hold(Component::Communication, self.statics.staging));
        if let Some(t) = self.eval {
            self.evaluate(ops, t);
        }
        ledger.at(Phase::Save, 0);
        drop(ledger.hold(Workspace, self.statics.save_transient));
        held.clear();
    }

    fn sim<'a>(&self, ops: &'a Ops, t: Tokens, train: bool) -> Sim<'a> {
        let s = self.shape;
        Sim { ops, t, d: s.d, heads: (s.heads, s.kv_heads, s.head_dim), train }
    }

    /// Ids, rotary tables, document starts, targets.
    fn batch(&self, ops: &Ops, t: Tokens) -> Held {
        let bytes = t.tokens * (4 + 4 * self.shape.head_dim + 4 + 12) + 4 * t.longest + 8 * t.targets;
        ops.ledger.hold(Component::Batch, bytes)
    }

    fn embedding(&self, ops: &Ops, t: Tokens) -> Held {
        let (e, d) = (&self.shape.embedding, self.shape.d);
        let x = ops.tensor(Component::Activations, t.tokens * d);
        if e.rank > 0 {
            let _rows = ops.tensor(Workspace, 2 * t.tokens * e.rank);
            ops.matmul_acc(t.tokens, e.rank, d, false);
        }
        x
    }

    /// `Walk::train`.
    fn step(&self, ops: &Ops) {
        let (s, t) = (self.shape, self.train);
        let sim = self.sim(ops, t, true);
        let _batch = self.batch(ops, t);
        let first = s.lowest.unwrap_or(usize::MAX).saturating_sub(1);
        ops.ledger.at(Phase::Forward, 0);
        let mut x = self.embedding(ops, t);
        let mut kept: Vec<Kept> = Vec::with_capacity(s.layers.len());
        for (l, layer) in s.layers.iter().enumerate() {
            ops.ledger.at(Phase::Forward, l + 1);
            let keeps_all = s.lowest.is_some() && l >= first && l - first >= self.recompute;
            let c = if keeps_all { Component::Activations } else { Workspace };
            let (y, saved) = sim.layer(layer, c, &x);
            kept.push(if s.lowest.is_none() || l < first {
                Kept::Nothing
            } else if !keeps_all {
                Kept::Input((!self.activations_on_host).then(|| x.clone()))
            } else {
                Kept::All(Box::new(saved))
            });
            x = y;
        }
        let waiting = ops.ledger.live().get(Component::Activations) * (self.stages - 1);
        let _waiting = ops.ledger.hold(Component::Activations, waiting);
        let head = s.layers.len() + 1;
        ops.ledger.at(Phase::Backward, head);
        let mut dy = self.head(ops, t, &sim, true);
        drop(x);
        for (l, layer) in s.layers.iter().enumerate().rev() {
            ops.ledger.at(Phase::Backward, l + 1);
            let saved = match kept.pop() {
                None | Some(Kept::Nothing) => return,
                Some(Kept::All(saved)) => *saved,
                Some(Kept::Input(x)) => {
                    let x = x.unwrap_or_else(|| ops.tensor(Component::Activations, t.tokens * s.d));
                    sim.layer(layer, Workspace, &x).1
                }
            };
            let dx = sim.layer_backward(layer, saved);
            dy = Some(dx);
        }
        let e = &s.embedding;
        if e.needs_input() {
            ops.ledger.at(Phase::Backward, 0);
            if e.rank > 0 {
                let _rows = ops.tensor(Workspace, 2 * t.tokens * e.rank);
                let _du = ops.tensor(Workspace, 2 * t.tokens * e.rank);
                let _grad = ops.f32(Workspace, e.rank * s.vocab);
            } else if ops.machine.cuda {
                let _dy = ops.f32(Workspace, 2 * t.tokens * s.d);
                let _grad = ops.f32(Workspace, s.vocab * s.d);
            } else if !ops.machine.wide() {
                let _dy = ops.f32(Workspace, t.tokens * s.d);
            }
        }
        drop(dy);
    }

    /// `Head::loss`: the gradient of its input, with `train`.
    fn head(&self, ops: &Ops, t: Tokens, sim: &Sim<'_>, train: bool) -> Option<Held> {
        let (s, l) = (self.shape, &self.shape.head);
        let chunk = chunk_rows(s.vocab);
        let mut grads = Vec::new();
        let mut from = 0;
        while from < t.targets {
            let rows = chunk.min(t.targets - from);
            from += rows;
            let _hx = ops.tensor(Workspace, rows * s.d);
            let (y, saved) = {
                let normed = ops.norm(Workspace, rows, s.d);
                sim.linear(l, Component::Logits, rows, &normed)
            };
            let logits = if ops.machine.wide() {
                y
            } else {
                let _y = y;
                ops.f32(Component::Logits, rows * s.vocab)
            };
            let dl = ops.cross_entropy(logits, rows, s.vocab, train);
            if let (true, Some(_dl)) = (train, dl) {
                let _narrow = (!ops.machine.wide()).then(|| ops.tensor(Component::Logits, rows * s.vocab));
                let _dn = sim.linear_backward(l, rows, &saved, None);
                grads.push(ops.norm_backward(rows, s.d));
            }
        }
        if !train {
            return None;
        }
        let dx = ops.tensor(Workspace, t.tokens * s.d);
        if grads.is_empty() {
            return Some(dx);
        }
        let _cat = (grads.len() > 1).then(|| ops.tensor(Workspace, t.targets * s.d));
        let out = ops.tensor(Workspace, t.tokens * s.d);
        drop(dx);
        Some(out)
    }

    /// `Walk::eval`.
    fn evaluate(&self, ops: &Ops, t: Tokens) {
        let sim = self.sim(ops, t, false);
        let _batch = self.batch(ops, t);
        ops.ledger.at(Phase::Evaluate, 0);
        let mut x = self.embedding(ops, t);
        for (l, layer) in self.shape.layers.iter().enumerate() {
            ops.ledger.at(Phase::Evaluate, l + 1);
            x = sim.layer(layer, Workspace, &x).0;
        }
        ops.ledger.at(Phase::Evaluate, self.shape.layers.len() + 1);
        self.head(ops, t, &sim, false);
        drop(x);
    }
}
