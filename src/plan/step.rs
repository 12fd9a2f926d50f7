//! A whole run as allocations: loading, the walk of a step, the optimizer, evaluation, saving.
//!
//! Mirrors `adapt/{params,build}.rs`, `walk/mod.rs`, `model/head.rs` and `train/step.rs`. What a visit of the walk
//! allocates does not depend on the layers around it, so each kind of visit is gone through once ([`Parts`]), and
//! a run with these levels or others is a sum over its layers: a plan compares hundreds of them.

use super::layer::{Sim, Tokens};
use super::ledger::{Bytes, Component, Held, Ledger, Listed, Peak, Phase};
use super::ops::{Machine, Ops, is_small, slab};
use super::shape::{Ffn, Layer, Linear, Shape};
use super::statics::{Statics, overhead};
use crate::walk::Decoded;
use Component::Workspace;

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
    /// Whether kept activations live on the host.
    pub activations_on_host: bool,
    /// Bytes of the orders that rows are shuffled into.
    pub orders: u64,
    /// Whether all tokens choose the same experts, or as many each.
    pub skewed: bool,
    /// Pipeline stages: that many micro-batches are between forward and backward at once.
    pub stages: u64,
}

/// What can be chosen when the micro-batch is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    /// Layers that are recomputed, from the lowest that is walked backward.
    pub recompute: usize,
    /// How their 4-bit weights are decoded.
    pub decoded: Decoded,
    /// Which of the head's chunks, by index into what [`Parts::new`] was given.
    pub head: usize,
}

/// Bytes with their sum, and the allocations that led there.
#[derive(Clone, Debug, Default)]
struct Full {
    bytes: Bytes,
    total: u64,
    listed: Vec<(Component, u64)>,
}

impl From<Bytes> for Full {
    fn from(bytes: Bytes) -> Self {
        Self { total: bytes.total(), bytes, listed: Vec::new() }
    }
}

impl Full {
    /// Of a ledger at its fullest.
    fn of(ledger: &Ledger) -> Self {
        Self { listed: ledger.listed(), ..ledger.fullest().into() }
    }
}

/// The visits of one kind of layer, each at its fullest with its own input, what it keeps and the gradient that
/// comes in.
#[derive(Clone, Debug)]
struct Kind {
    /// Forward, keeping nothing but perhaps the input.
    forward: Full,
    /// Forward, keeping everything.
    forward_keeping: Full,
    /// What that keeps, the input among it.
    kept: Full,
    /// Backward of what was kept.
    backward: Full,
    /// Forward again and backward: decoded by panels, and for the visit.
    again: [Full; 2],
    /// Forward in evaluation.
    eval: Option<Full>,
}

/// The parts of a run, each gone through once.
#[derive(Clone, Debug)]
pub struct Parts<'a> {
    run: Run<'a>,
    statics: Full,
    batch: Full,
    embedding: Full,
    embedding_backward: Option<Full>,
    kinds: Vec<Kind>,
    /// Kind of each layer.
    of: Vec<usize>,
    /// Input of a layer.
    input: Full,
    /// The head in training and in evaluation, by chunk.
    heads: Vec<(Full, Option<Full>)>,
    /// Batch and embedding in evaluation.
    eval: Option<(Full, Full)>,
    optimizer: u64,
    /// The same run with the most uneven routing, where there are experts.
    skewed: Option<Box<Parts<'a>>>,
}

/// One place of a run: what is held there, in parts.
struct Spot<'p> {
    phase: Phase,
    unit: usize,
    /// Micro-batch, and the visit.
    parts: [Option<&'p Full>; 2],
    /// Layers below this have kept theirs.
    kept: usize,
    kept_total: u64,
    /// Activations of other micro-batches of a pipeline.
    waiting: u64,
    /// Bytes of [`Workspace`] beside them.
    extra: u64,
}

impl Spot<'_> {
    fn total(&self) -> u64 {
        let parts: u64 = self.parts.iter().flatten().map(|f| f.total).sum();
        parts + self.kept_total + self.waiting + self.extra
    }
}

impl<'a> Parts<'a> {
    /// Goes through each part of a run; `heads` are the head's chunks that may be chosen, in rows.
    pub fn new(run: Run<'a>, heads: &[u64]) -> Self {
        let s = run.shape;
        let mixture = s.layers.iter().any(|l| matches!(l.ffn, Ffn::Experts { .. }));
        let skewed =
            (mixture && !run.skewed).then(|| Box::new(Self::new(Run { skewed: true, ..run.clone() }, heads)));
        let mut kinds: Vec<(&Layer, Kind)> = Vec::new();
        let mut of = Vec::with_capacity(s.layers.len());
        for layer in &s.layers {
            let known = kinds.iter().position(|(l, _)| *l == layer);
            of.push(known.unwrap_or(kinds.len()));
            if known.is_none() {
                kinds.push((layer, run.kind(layer)));
            }
        }
        let embedding = |t| run.at_fullest(|ops| drop(run.embedding(ops, t)));
        let backward = s.embedding.needs_input().then(|| run.at_fullest(|ops| run.embedding_backward(ops)));
        let one = run.fresh();
        let input = one.tensor(Component::Activations, run.train.tokens * s.d);
        let mut statics = run.statics.device.clone();
        statics.add(Component::Batch, run.orders);
        if !run.machine.cuda && is_small(run.least_product()) {
            statics.add(Component::Context, slab());
        }
        let parts = Self {
            statics: statics.into(),
            batch: run.at_fullest(|ops| drop(run.batch(ops, run.train))),
            embedding: embedding(run.train),
            embedding_backward: backward,
            kinds: kinds.into_iter().map(|(_, k)| k).collect(),
            of,
            input: one.ledger.live().into(),
            heads: heads.iter().map(|rows| run.head_visits(*rows)).collect(),
            eval: run.eval.map(|t| (run.at_fullest(|ops| drop(run.batch(ops, t))), embedding(t))),
            optimizer: {
                let ops = run.fresh();
                ops.adamw(run.statics.largest_stretch);
                ops.ledger.fullest().total().max(run.statics.step_transient).max(run.statics.staging)
            },
            skewed,
            run,
        };
        drop(input);
        parts
    }

    /// Layers, from the bottom, that backward does not walk.
    fn first(&self) -> usize {
        self.run.shape.lowest.map_or(usize::MAX, |u| u.saturating_sub(1))
    }

    /// What a layer keeps from forward to backward.
    fn kept(&self, l: usize, levels: Levels) -> Option<&Full> {
        let first = self.first();
        if l < first {
            None
        } else if l - first >= levels.recompute {
            Some(&self.kinds[self.of[l]].kept)
        } else {
            (!self.run.activations_on_host).then_some(&self.input)
        }
    }

    /// Calls `f` with every place of the run, in order.
    fn each<'p>(&'p self, levels: Levels, f: &mut dyn FnMut(Spot<'p>)) {
        let (first, count) = (self.first(), self.of.len());
        let statics = self.run.statics;
        let still = |phase, extra| Spot {
            phase,
            unit: 0,
            parts: [None, None],
            kept: 0,
            kept_total: 0,
            waiting: 0,
            extra,
        };
        f(still(Phase::Load, statics.load_transient));
        let mut at = still(Phase::Forward, 0);
        at.parts = [Some(&self.batch), Some(&self.embedding)];
        let visit = |at: &Spot<'p>, phase, unit, full: &'p Full| Spot {
            phase,
            unit,
            parts: [at.parts[0], Some(full)],
            ..*at
        };
        f(visit(&at, Phase::Forward, 0, &self.embedding));
        for (l, kind) in self.of.iter().enumerate() {
            let kind = &self.kinds[*kind];
            let keeps = l >= first && l - first >= levels.recompute;
            let full = if keeps { &kind.forward_keeping } else { &kind.forward };
            f(visit(&at, Phase::Forward, l + 1, full));
            at.kept = l + 1;
            at.kept_total += self.kept(l, levels).map_or(0, |k| k.total);
        }
        if self.run.stages > 1 {
            let kept: u64 = (0..count)
                .filter_map(|l| self.kept(l, levels))
                .map(|k| k.bytes.get(Component::Activations))
                .sum();
            at.waiting = (kept + self.input.total) * (self.run.stages - 1);
        }
        let (head, head_eval) = &self.heads[levels.head];
        f(visit(&at, Phase::Backward, count + 1, head));
        for (l, kind) in self.of.iter().enumerate().rev() {
            if l < first {
                break;
            }
            at.kept = l;
            at.kept_total -= self.kept(l, levels).map_or(0, |k| k.total);
            let kind = &self.kinds[*kind];
            let full = if l - first >= levels.recompute {
                &kind.backward
            } else {
                &kind.again[usize::from(levels.decoded == Decoded::Visit)]
            };
            f(visit(&at, Phase::Backward, l + 1, full));
        }
        if let Some(full) = &self.embedding_backward {
            f(visit(&at, Phase::Backward, 0, full));
        }
        f(still(Phase::Step, self.optimizer));
        if let Some((batch, embedding)) = &self.eval {
            let mut at = still(Phase::Evaluate, 0);
            at.parts[0] = Some(batch);
            f(visit(&at, Phase::Evaluate, 0, embedding));
            for (l, kind) in self.of.iter().enumerate() {
                if let Some(full) = &self.kinds[*kind].eval {
                    f(visit(&at, Phase::Evaluate, l + 1, full));
                }
            }
            if let Some(full) = head_eval {
                f(visit(&at, Phase::Evaluate, count + 1, full));
            }
        }
        f(still(Phase::Save, statics.save_transient));
    }

    /// Bytes at the fullest: the engine's, the allocator's, and what the most uneven routing takes.
    pub fn total(&self, levels: Levels) -> u64 {
        let engine = self.engine(levels);
        engine + overhead(self.run.machine, engine) + self.routing(levels, engine)
    }

    /// The engine's own bytes at the fullest.
    fn engine(&self, levels: Levels) -> u64 {
        let mut most = 0;
        self.each(levels, &mut |spot| most = most.max(spot.total()));
        self.statics.total + most
    }

    /// What the most uneven routing takes beyond these bytes.
    fn routing(&self, levels: Levels, engine: u64) -> u64 {
        self.skewed.as_ref().map_or(0, |s| s.engine(levels).saturating_sub(engine))
    }

    /// What is held where it is fullest.
    pub fn peak(&self, levels: Levels) -> Peak {
        let mut fullest: Option<Spot<'_>> = None;
        let mut phases = [0; Phase::ALL.len()];
        self.each(levels, &mut |spot| {
            let phase = &mut phases[spot.phase as usize];
            *phase = (*phase).max(self.statics.total + spot.total());
            if fullest.as_ref().is_none_or(|f| spot.total() > f.total()) {
                fullest = Some(spot);
            }
        });
        let mut bytes = self.statics.bytes.clone();
        let mut at = (Phase::Load, 0);
        if let Some(spot) = fullest {
            at = (spot.phase, spot.unit);
            spot.parts.iter().flatten().for_each(|f| bytes.add_all(&f.bytes));
            (0..spot.kept).filter_map(|l| self.kept(l, levels)).for_each(|k| bytes.add_all(&k.bytes));
            bytes.add(Component::Activations, spot.waiting);
            bytes.add(Workspace, spot.extra);
        }
        let engine = bytes.total();
        bytes.add(Component::Routing, self.routing(levels, engine));
        bytes.add(Component::Slack, overhead(self.run.machine, engine));
        Peak { phase: at.0, unit: at.1, bytes, phases }
    }
}

impl Parts<'_> {
    /// Every allocation, each kind once at each place.
    pub fn listed(&self, levels: Levels) -> Vec<Listed> {
        let mut all: Vec<Listed> = Vec::new();
        let mut list = |phase, unit, component, bytes| all.push(Listed { phase, unit, component, bytes });
        self.statics.bytes.iter().for_each(|(c, b)| list(Phase::Load, 0, c, b));
        self.each(levels, &mut |spot| {
            let [batch, visit] = spot.parts;
            let batch = batch.filter(|_| spot.unit == 0 && spot.phase != Phase::Backward);
            for (c, b) in batch.into_iter().chain(visit).flat_map(|f| &f.listed) {
                list(spot.phase, spot.unit, *c, *b);
            }
            if spot.extra > 0 {
                list(spot.phase, spot.unit, Workspace, spot.extra);
            }
        });
        all
    }
}

impl Run<'_> {
    /// Operations on an empty ledger.
    fn fresh(&self) -> Ops {
        Ops { ledger: Default::default(), machine: self.machine }
    }

    /// Multiplications of the smallest product with a matrix of a layer in training.
    fn least_product(&self) -> u64 {
        let t = self.train.tokens;
        let of = |l: &Linear, rows: u64| rows * l.i * if l.rank > 0 { l.rank.min(l.o) } else { l.o };
        let layer = |layer: &Layer| match &layer.ffn {
            Ffn::Dense(_) => layer.linears().map(|(l, _)| of(l, t)).min(),
            Ffn::Experts { router, experts, top_k, .. } => {
                let rows = t * top_k / router.o.max(1);
                let experts = experts.iter().flat_map(|(e, _)| e).map(|l| of(l, rows));
                layer.attention.iter().chain([router]).map(|l| of(l, t)).chain(experts).min()
            }
        };
        self.shape.layers.iter().filter_map(layer).min().unwrap_or(0)
    }

    fn at_fullest(&self, f: impl FnOnce(&Ops)) -> Full {
        let ops = self.fresh();
        f(&ops);
        Full::of(&ops.ledger)
    }

    fn sim<'a>(&self, ops: &'a Ops, t: Tokens, train: bool) -> Sim<'a> {
        let s = self.shape;
        let heads = (s.heads, s.kv_heads, s.head_dim);
        Sim { ops, t, d: s.d, heads, train, decoded: Decoded::Panels, skewed: self.skewed }
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

    fn embedding_backward(&self, ops: &Ops) {
        let (s, t, e) = (self.shape, self.train, &self.shape.embedding);
        let _dy = ops.tensor(Workspace, t.tokens * s.d);
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

    /// The visits of `Walk::train` and `Walk::eval` at a layer.
    fn kind(&self, layer: &Layer) -> Kind {
        let t = self.train;
        let n = t.tokens * self.shape.d;
        let input = |ops: &Ops| ops.tensor(Component::Activations, n);
        let keeping = self.fresh();
        let sim = self.sim(&keeping, t, true);
        let (y, saved) = sim.layer(layer, Component::Activations, &input(&keeping));
        let forward_keeping = Full::of(&keeping.ledger);
        drop(y);
        let kept = keeping.ledger.live();
        keeping.ledger.restart();
        let dy = keeping.tensor(Workspace, n);
        sim.layer_backward(layer, saved);
        drop(dy);
        let again = [Decoded::Panels, Decoded::Visit].map(|decoded| {
            self.at_fullest(|ops| {
                let (x, _dy) = (input(ops), ops.tensor(Workspace, n));
                let sim = Sim { decoded, ..self.sim(ops, t, true) };
                let _matrices = sim.visited(layer);
                let saved = sim.layer(layer, Workspace, &x).1;
                drop(x);
                sim.layer_backward(layer, saved);
            })
        });
        Kind {
            forward: self.at_fullest(|ops| drop(self.sim(ops, t, true).layer(layer, Workspace, &input(ops)))),
            forward_keeping,
            kept: kept.into(),
            backward: Full::of(&keeping.ledger),
            again,
            eval: self.eval.map(|t| {
                self.at_fullest(|ops| {
                    let x = ops.tensor(Component::Activations, t.tokens * self.shape.d);
                    self.sim(ops, t, false).layer(layer, Workspace, &x);
                })
            }),
        }
    }

    /// The head with chunks of at most `rows`, in training and in evaluation.
    fn head_visits(&self, rows: u64) -> (Full, Option<Full>) {
        let visit = |t: Tokens, train| {
            self.at_fullest(|ops| {
                let _x = ops.tensor(Component::Activations, t.tokens * self.shape.d);
                self.head(ops, t, rows, train);
            })
        };
        (visit(self.train, true), self.eval.map(|t| visit(t, false)))
    }

    /// `Head::loss`. The last chunk is at least as large as any, and met by the gradients of all others.
    fn head(&self, ops: &Ops, t: Tokens, most: u64, train: bool) {
        let (s, l) = (self.shape, &self.shape.head);
        let sim = self.sim(ops, t, train);
        let count = t.targets.div_ceil(most.max(1));
        let rows = t.targets.div_ceil(count.max(1));
        let mut grads = Vec::new();
        if rows > 0 {
            if train && count > 1 {
                grads.push(ops.tensor(Workspace, (t.targets - rows) * s.d));
            }
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
            return;
        }
        let dx = ops.tensor(Workspace, t.tokens * s.d);
        if grads.is_empty() {
            return;
        }
        let _cat = (count > 1).then(|| ops.tensor(Workspace, t.targets * s.d));
        let _out = ops.tensor(Workspace, t.tokens * s.d);
        drop(dx);
    }
}
