//! A whole run as a sequence of allocations: loading, the walk of a step, optimizer, evaluation, saving.
//!
//! Visits run the engine's own code on ghosts. A visit's allocations do not depend on the other layers,
//! so each kind of visit runs once ([`Parts`]). A run is then a sum over layers, cheap enough to compare
//! hundreds of combinations.

use super::ledger::{Bytes, Component, Listed, Peak, Phase};
use super::shape::Shape;
use super::statics::{Statics, overhead};
use super::visits::{Full, Kind, Way};
use super::work::{Balance, Work};
use super::workload::Tokens;
use Component::Workspace;
use candle_core::Result;
use ft_engine::model::Batch;
use ft_engine::model::layer::{FeedForward, Level};
use ft_engine::walk::generate::PART;
use ft_engine::walk::{Dequantize, Inputs, Recomputed};
use ft_kernels::attention::Cache;
use ft_kernels::ledger::Cost;

/// Inputs of the simulation.
#[derive(Clone, Debug)]
pub struct StepInputs<'a> {
    pub shape: &'a Shape,
    /// Static bytes of the rank.
    pub statics: &'a Statics,
    /// Training micro-batch.
    pub train: Tokens,
    /// Evaluation micro-batch, if the recipe evaluates.
    pub eval: Option<Tokens>,
    /// Generation in evaluation, if the recipe asks for it.
    pub answers: Option<Answers>,
    /// Bytes of shuffled row orders.
    pub orders: u64,
    /// NEFTune noise scale.
    pub neftune: f64,
    /// Whether all tokens choose the same experts; balanced routing if not.
    pub skewed: bool,
    /// Pipeline stages, also the number of micro-batches in flight.
    pub stages: u64,
}

/// Generation from the longest prompt, and its key-value cache.
#[derive(Clone, Copy, Debug)]
pub struct Answers {
    /// Prompt tokens processed at a time.
    pub part: Tokens,
    /// Cache bytes over all layers, after the prompt and after the answer.
    pub cache: [u64; 2],
}

impl Answers {
    /// For at most `prompt` and `answer` tokens, with `token` bytes of cache a token.
    pub fn new(prompt: u64, answer: u64, token: u64) -> Self {
        let part = prompt.min(PART as u64);
        let read = Cache::held(prompt, prompt + answer);
        let cache = [read, prompt + answer].map(|tokens| tokens.saturating_mul(token));
        Self { part: Tokens::of(&[usize::try_from(part).unwrap_or(usize::MAX)], 0), cache }
    }
}

/// Settings the search varies for a given micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    pub recompute: Recomputed,
    /// Place of recomputed layers' inputs; on the CPU host and device are the same.
    pub inputs: Inputs,
    /// Dequantization of recomputed layers' 4-bit weights.
    pub dequantize: Dequantize,
    /// Index of the logit chunk in the `heads` of [`Parts::new`].
    pub head: usize,
}

/// Simulated visits of a run, each kind run once.
#[derive(Clone, Debug)]
pub struct Parts<'a> {
    run: StepInputs<'a>,
    statics: Full,
    batch: Full,
    embedding: Full,
    embedding_backward: Option<Full>,
    kinds: Vec<Kind>,
    /// Input of a layer.
    input: Full,
    /// By logit chunk: head in training, cost of its forward pass, head in evaluation.
    heads: Vec<(Full, Cost, Option<Full>)>,
    /// Batch and embedding in evaluation.
    eval: Option<(Full, Full)>,
    /// Batch and embedding of a prompt in generation.
    answer: Option<(Full, Full)>,
    optimizer: u64,
    /// Gathered weight bytes during and after a visit, by visit: training, then evaluation.
    flights: [Vec<[u64; 2]>; 2],
    /// The same run with all tokens on the same experts, for mixtures.
    skewed: Option<Box<Parts<'a>>>,
}

/// One point of a run, with the bytes held there.
struct Spot<'p> {
    phase: Phase,
    unit: usize,
    /// Micro-batch, and the visit.
    parts: [Option<&'p Full>; 2],
    /// Layers below this index hold saved activations.
    kept: usize,
    kept_total: u64,
    /// Saved activations of other micro-batches in the pipeline.
    waiting: u64,
    /// Additional bytes of [`Workspace`].
    extra: u64,
    /// Gradient bytes of one micro-batch.
    live: u64,
    /// Gathered weights ([`Component::InFlight`]).
    flight: u64,
    /// Key-value cache ([`Component::Cache`]).
    cache: u64,
    /// An input in transfer to or from the host ([`Component::Activations`]).
    crossing: u64,
}

impl Spot<'_> {
    fn total(&self) -> u64 {
        let parts: u64 = self.parts.iter().flatten().map(|f| f.total).sum();
        parts
            + self.kept_total
            + self.waiting
            + self.extra
            + self.live
            + self.flight
            + self.cache
            + self.crossing
    }
}

impl<'a> Parts<'a> {
    /// Runs each kind of visit once; `heads` are candidate logit chunk sizes in rows.
    ///
    /// # Errors
    /// Inconsistent sizes.
    pub fn new(run: StepInputs<'a>, heads: &[u64]) -> Result<Self> {
        let s = run.shape;
        let mixture = s.kinds.iter().any(|l| matches!(l.mlp, FeedForward::Mixture(_)));
        let skewed = match mixture && !run.skewed {
            true => Some(Box::new(Self::new(StepInputs { skewed: true, ..run.clone() }, heads)?)),
            false => None,
        };
        s.ledger.route(run.skewed);
        let unit = |kind| s.of.iter().position(|k| *k == kind).map_or(0, |l| l + 1);
        let kinds = s.kinds.iter().enumerate().map(|(k, layer)| run.kind(layer, unit(k)));
        let kinds = kinds.collect::<Result<Vec<Kind>>>()?;
        let mut statics = run.statics.device.clone();
        statics.add(Component::Batch, run.orders);
        let embedding = |t: Tokens, train: bool| {
            let batch = run.batch(t, train)?;
            run.visit(|| batch.noisy(s.embedding.forward(&batch.ids)?, run.neftune).map(drop))
        };
        let batch = |t: Tokens| -> Full {
            let mut bytes = Bytes::default();
            let (targets, cuda) = (t.targets as usize, run.machine().cuda);
            bytes.add(Component::Batch, Batch::bytes(t.attended(), targets, s.head_dim, cuda));
            bytes.into()
        };
        let mut input = Bytes::default();
        input.add(Component::Activations, run.train.tokens * s.d as u64 * s.dtype.size_in_bytes() as u64);
        Ok(Self {
            statics: statics.into(),
            skewed,
            batch: batch(run.train),
            embedding: embedding(run.train, true)?,
            embedding_backward: s.embedding.trains().then(|| run.embedding_backward()).transpose()?,
            kinds,
            input: input.into(),
            heads: heads.iter().map(|rows| run.head(*rows as usize)).collect::<Result<_>>()?,
            eval: run.eval.map(|t| embedding(t, false).map(|e| (batch(t), e))).transpose()?,
            answer: run.answers.map(|a| embedding(a.part, false).map(|e| (batch(a.part), e))).transpose()?,
            flights: [s.outline().training(s.lowest), s.outline().forward()].map(|v| run.flights(&v)),
            optimizer: run
                .optimizer()?
                .max(run.statics.projecting)
                .max(run.statics.staging)
                .max(run.statics.given[1]),
            run,
        })
    }

    /// Lowest layer walked backward.
    fn first(&self) -> usize {
        self.run.shape.lowest.map_or(usize::MAX, |u| u.saturating_sub(1))
    }

    /// Recompute level of a layer; `None` if not walked backward.
    fn level(&self, l: usize, levels: Levels) -> Option<Level> {
        l.checked_sub(self.first()).map(|i| levels.recompute.level(i))
    }

    /// Saved activations and backward visit of a layer at its recompute level.
    fn way(&self, l: usize, levels: Levels) -> Option<&Way> {
        self.level(l, levels).map(|level| &self.kinds[self.run.shape.of[l]].ways[level as usize])
    }

    /// Saved activations of a layer, without the input if offloaded.
    fn kept(&self, l: usize, levels: Levels) -> Option<&Full> {
        let elsewhere = self.waits(l, levels) && self.run.machine().cuda;
        self.way(l, levels).map(|way| if elsewhere { &way.beside } else { &way.kept })
    }

    /// Whether a layer's input waits on the host: some of the layer is recomputed, and it is not the
    /// topmost (visited first in the backward pass).
    fn waits(&self, l: usize, levels: Levels) -> bool {
        let recomputed = self.level(l, levels) > Some(Level::None);
        levels.inputs.on_host && recomputed && l + 1 < self.run.shape.of.len()
    }

    /// Bytes of the lower layer's input, in transfer while layer `l` is visited.
    fn crosses(&self, l: usize, levels: Levels) -> u64 {
        if l > 0 && self.waits(l - 1, levels) { self.input.total } else { 0 }
    }

    /// Calls `f` with every point of the run, in order.
    fn each<'p>(&'p self, levels: Levels, f: &mut dyn FnMut(Spot<'p>)) {
        let count = self.run.shape.of.len();
        let statics = self.run.statics;
        let still = |phase, extra| Spot {
            phase,
            unit: 0,
            parts: [None, None],
            kept: 0,
            kept_total: 0,
            waiting: 0,
            extra,
            live: 0,
            flight: 0,
            cache: 0,
            crossing: 0,
        };
        let [mut train, mut evaluate] = self.flights.each_ref().map(|f| f.iter());
        f(still(Phase::Load, statics.load_transient));
        let mut at = still(Phase::Forward, 0);
        at.parts = [Some(&self.batch), Some(&self.embedding)];
        let visit = |at: &Spot<'p>, phase, unit, full: &'p Full| Spot {
            phase,
            unit,
            parts: [at.parts[0], Some(full)],
            ..*at
        };
        // bytes gathered during a visit, and bytes left after it
        let mut after = 0;
        let mut next = |at: &mut Spot<'p>, flights: &mut std::slice::Iter<'_, [u64; 2]>| {
            [at.flight, after] = flights.next().copied().unwrap_or_default();
            after
        };
        next(&mut at, &mut train);
        f(visit(&at, Phase::Forward, 0, &self.embedding));
        for (l, kind) in self.run.shape.of.iter().enumerate() {
            let kind = &self.kinds[*kind];
            next(&mut at, &mut train);
            at.crossing = self.crosses(l, levels);
            f(visit(&at, Phase::Forward, l + 1, &kind.forward));
            at.crossing = 0;
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
        let (head, _, head_eval) = &self.heads[levels.head];
        let left = next(&mut at, &mut train);
        f(visit(&at, Phase::Backward, count + 1, head));
        at.live = self.live(count + 1);
        f(self.summing(&at, count + 1, left));
        for (l, kind) in self.run.shape.of.iter().enumerate().rev() {
            let Some(way) = self.way(l, levels) else { break };
            at.kept = l;
            at.kept_total -= self.kept(l, levels).map_or(0, |k| k.total);
            let kind = &self.kinds[*kind];
            let (full, _) = way.backward(levels.dequantize);
            at.live = self.live(l + 1) + self.run.statics.on_its_way(l + 1);
            let left = next(&mut at, &mut train);
            at.crossing = self.crosses(l, levels);
            // `full` already includes the layer's own gradients
            let before = Spot { live: at.live - kind.own, ..at };
            f(visit(&before, Phase::Backward, l + 1, full));
            f(self.summing(&at, l + 1, left));
            at.crossing = 0;
        }
        if let Some(full) = &self.embedding_backward {
            at.live = self.live(0) + self.run.statics.on_its_way(0);
            let left = next(&mut at, &mut train);
            f(visit(&at, Phase::Backward, 0, full));
            f(self.summing(&at, 0, left));
        }
        f(still(Phase::Step, self.optimizer));
        if let Some((batch, embedding)) = &self.eval {
            let mut at = still(Phase::Evaluate, 0);
            at.parts[0] = Some(batch);
            next(&mut at, &mut evaluate);
            f(visit(&at, Phase::Evaluate, 0, embedding));
            for (l, kind) in self.run.shape.of.iter().enumerate() {
                next(&mut at, &mut evaluate);
                if let Some(full) = &self.kinds[*kind].eval {
                    f(visit(&at, Phase::Evaluate, l + 1, full));
                }
            }
            next(&mut at, &mut evaluate);
            if let Some(full) = head_eval {
                f(visit(&at, Phase::Evaluate, count + 1, full));
            }
        }
        if let (Some((batch, embedding)), Some(answers)) = (&self.answer, self.run.answers) {
            let mut flights = self.flights[1].iter();
            let mut at = still(Phase::Evaluate, 0);
            at.parts[0] = Some(batch);
            at.cache = answers.cache[0];
            next(&mut at, &mut flights);
            f(visit(&at, Phase::Evaluate, 0, embedding));
            for (l, kind) in self.run.shape.of.iter().enumerate() {
                next(&mut at, &mut flights);
                if let Some(full) = &self.kinds[*kind].answer {
                    f(visit(&at, Phase::Evaluate, l + 1, full));
                }
            }
            // logits of one token, in the compute dtype and in f32
            let logits = self.run.shape.head.vocab as u64 * (self.run.machine().width + 4);
            f(Spot { unit: count + 1, cache: answers.cache[1], ..still(Phase::Evaluate, logits) });
        }
        f(still(Phase::Save, statics.save_transient));
    }

    /// Live gradient bytes of one micro-batch during a unit's backward visit.
    fn live(&self, unit: usize) -> u64 {
        self.run.statics.live_at(unit)
    }

    /// The reduction of a unit's gradients, with the weights gathered for the next visit.
    fn summing<'p>(&'p self, at: &Spot<'p>, unit: usize, flight: u64) -> Spot<'p> {
        let statics = self.run.statics;
        let given = if at.live > 0 { statics.summing(unit) } else { 0 };
        let parts = [at.parts[0], Some(&self.input)];
        // with the temporaries of the unit's update, if it runs here
        let extra =
            if statics.updates && statics.live_as == Component::Gradients { self.optimizer } else { 0 };
        Spot { phase: Phase::Backward, unit, parts, live: at.live + given, flight, extra, ..*at }
    }

    /// Peak bytes: engine, allocator overhead, routing reserve.
    pub fn total(&self, levels: Levels) -> u64 {
        let engine = self.engine(levels);
        engine + overhead(self.run.machine(), engine) + self.routing(levels, engine)
    }

    /// Peak bytes of the engine alone.
    fn engine(&self, levels: Levels) -> u64 {
        let mut most = 0;
        self.each(levels, &mut |spot| most = most.max(spot.total()));
        self.statics.total + most
    }

    /// Extra bytes with all tokens on the same experts.
    fn routing(&self, levels: Levels, engine: u64) -> u64 {
        self.skewed.as_ref().map_or(0, |s| s.engine(levels).saturating_sub(engine))
    }

    /// Bytes held at the peak, by component.
    pub fn peak(&self, levels: Levels) -> Peak {
        let mut at_peak: Option<Spot<'_>> = None;
        let mut phases = [0; Phase::ALL.len()];
        self.each(levels, &mut |spot| {
            let phase = &mut phases[spot.phase as usize];
            *phase = (*phase).max(self.statics.total + spot.total());
            if at_peak.as_ref().is_none_or(|f| spot.total() > f.total()) {
                at_peak = Some(spot);
            }
        });
        let mut bytes = self.statics.bytes.clone();
        let mut at = (Phase::Load, 0);
        if let Some(spot) = at_peak {
            at = (spot.phase, spot.unit);
            spot.parts.iter().flatten().for_each(|f| bytes.add_all(&f.bytes));
            (0..spot.kept).filter_map(|l| self.kept(l, levels)).for_each(|k| bytes.add_all(&k.bytes));
            bytes.add(Component::Activations, spot.waiting + spot.crossing);
            bytes.add(Workspace, spot.extra);
            bytes.add(self.run.statics.live_as, spot.live);
            bytes.add(Component::InFlight, spot.flight);
            bytes.add(Component::Cache, spot.cache);
        }
        let engine = bytes.total();
        bytes.add(Component::Routing, self.routing(levels, engine));
        bytes.add(Component::AllocatorOverhead, overhead(self.run.machine(), engine));
        Peak { phase: at.0, unit: at.1, bytes, phases }
    }
}

impl Parts<'_> {
    /// Work of a micro-batch.
    pub fn work(&self, levels: Levels) -> Work {
        let b = Balance::of(self.run.machine());
        let (head, forward, _) = &self.heads[levels.head];
        let (mut up, mut again, mut down) = (*forward, Cost::default(), head.cost);
        down.add(*forward, -1.0);
        up.add(self.embedding.cost, 1.0);
        self.embedding_backward.iter().for_each(|e| down.add(e.cost, 1.0));
        let mut waiting = 0.0;
        for (l, kind) in self.run.shape.of.iter().enumerate() {
            let crossing = self.crosses(l, levels);
            let mut wait = |visit: [Cost; 3]| {
                if crossing > 0 {
                    waiting += b.waiting(crossing, levels.inputs, Work::of(visit, b));
                }
            };
            let none = Cost::default();
            let forward = self.kinds[*kind].forward.cost;
            up.add(forward, 1.0);
            wait([forward, none, none]);
            if let Some(way) = self.way(l, levels) {
                let (both, first) = way.backward(levels.dequantize);
                let mut rest = both.cost;
                rest.add(*first, -1.0);
                again.add(*first, 1.0);
                down.add(rest, 1.0);
                wait([none, *first, rest]);
            }
        }
        let head = [forward.flops, head.cost.flops - forward.flops];
        Work { head, waiting, ..Work::of([up, again, down], b) }
    }

    /// All allocations; each kind appears once per place.
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
            let beside = [
                (Workspace, spot.extra),
                (self.run.statics.live_as, spot.live),
                (Component::InFlight, spot.flight),
                (Component::Cache, spot.cache),
                (Component::Activations, spot.crossing),
            ];
            for (component, bytes) in beside {
                if bytes > 0 {
                    list(spot.phase, spot.unit, component, bytes);
                }
            }
        });
        all
    }
}
