//! A whole run as a sequence of allocations: loading, the walk of a step, optimizer, evaluation, saving.
//!
//! Visits run the engine's own code on ghosts. A visit's allocations do not depend on the other layers,
//! so each kind of visit runs once ([`Simulation`]). A run is then a sum over layers, cheap enough to compare
//! hundreds of combinations.

use super::component::{Allocation, Bytes, Component, Peak, Phase};
use super::overhead::overhead;
use super::visits::{BackwardVisit, LayerVisits, Segments, StepInputs, Usage, attention_of};
use crate::time::{CostModel, Work};
use crate::workload::Tokens;
use Component::Workspace;
use candle_core::Result;
use ft_engine::model::Batch;
use ft_engine::model::layer::Level;
use ft_engine::walk::{Dequantize, Inputs, Recomputed, Visit};
use ft_kernels::ledger::{Cost, Wire};
use std::collections::BTreeSet;

/// Settings the search varies for a given micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    pub recompute: Recomputed,
    /// Place of recomputed layers' inputs; on the CPU host and device are the same.
    pub inputs: Inputs,
    /// Dequantization of recomputed layers' 4-bit weights.
    pub dequantize: Dequantize,
    /// Index of the logit chunk in the `heads` of [`Simulation::new`].
    pub head: usize,
}

/// Simulated visits of a run, one per kind.
#[derive(Clone, Debug)]
pub struct Simulation<'a> {
    run: StepInputs<'a>,
    states: Usage,
    batch: Usage,
    embedding: Usage,
    embedding_backward: Option<Usage>,
    kinds: Vec<LayerVisits>,
    /// Input of a layer.
    input: Usage,
    /// By logit chunk: head in training, cost of its forward pass, head in evaluation.
    heads: Vec<(Usage, Cost, Option<Usage>)>,
    /// Batch and embedding in evaluation.
    eval: Option<(Usage, Usage)>,
    /// Batch and embedding of a prompt in generation.
    answer: Option<(Usage, Usage)>,
    optimizer: u64,
    /// Visits of a micro-batch.
    order: Vec<Visit>,
    /// Gathered weight bytes during and after a visit, by visit: training, then evaluation.
    flights: [Vec<[u64; 2]>; 2],
    /// The same run with all tokens on the same experts, for mixtures.
    skewed: Option<Box<Simulation<'a>>>,
}

/// One point of a run, with the held bytes.
#[derive(Clone, Copy, Default)]
struct Point<'p> {
    phase: Phase,
    unit: usize,
    /// Micro-batch, and the visit.
    parts: [Option<&'p Usage>; 2],
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
    /// Per-layer inputs, shared keys and values, and their gradients ([`Component::Activations`]).
    shared_state: u64,
}

impl<'p> Point<'p> {
    /// A point outside of visits, with `extra` temporary bytes.
    fn new(phase: Phase, extra: u64) -> Self {
        Self { phase, extra, ..Self::default() }
    }

    /// The visit of a unit from here.
    fn visit(&self, unit: usize, usage: &'p Usage) -> Self {
        Self { unit, parts: [self.parts[0], Some(usage)], ..*self }
    }

    /// Gathers the weights of the next visit; returns the bytes left after it.
    fn next(&mut self, flights: &mut Flights<'_>) -> u64 {
        let [during, after] = flights.next().unwrap_or_default();
        self.flight = during;
        after
    }

    /// Components other than the visit's and the saved activations.
    fn beside(&self, live_as: Component) -> [(Component, u64); 5] {
        [
            (Workspace, self.extra),
            (live_as, self.live),
            (Component::InFlight, self.flight),
            (Component::Cache, self.cache),
            (Component::Activations, self.crossing + self.shared_state),
        ]
    }

    fn total(&self) -> u64 {
        let parts: u64 = self.parts.iter().flatten().map(|f| f.total).sum();
        let weights = self.live + self.flight + self.cache;
        parts + self.kept_total + self.waiting + self.extra + self.crossing + self.shared_state + weights
    }
}

/// Bytes of gathered weights during each visit, and after it.
type Flights<'f> = std::iter::Copied<std::slice::Iter<'f, [u64; 2]>>;

impl<'a> Simulation<'a> {
    /// Runs each kind of visit once; `heads` are candidate logit chunk sizes in rows.
    ///
    /// # Errors
    /// Inconsistent sizes.
    pub fn new(run: StepInputs<'a>, heads: &[u64]) -> Result<Self> {
        let s = run.shape;
        let mixture = s.kinds.iter().any(|l| l.mlp.mixture().is_some());
        let skewed = match mixture && !run.skewed {
            true => Some(Box::new(Self::new(StepInputs { skewed: true, ..run.clone() }, heads)?)),
            false => None,
        };
        s.ledger.route(run.skewed);
        let unit = |kind| s.of.iter().position(|k| *k == kind).map_or(0, |l| l + 1);
        let kinds = s.kinds.iter().enumerate().map(|(k, layer)| run.kind(layer, unit(k)));
        let kinds = kinds.collect::<Result<Vec<LayerVisits>>>()?;
        let mut states = run.states.device.clone();
        states.add(Component::Batch, run.orders);
        if run.keeps_ends() {
            states.add(run.states.live_as, run.states.ends);
        }
        let embedding = |t: Tokens, train: bool| {
            let batch = run.batch(t, train)?;
            run.visit(|| {
                let x = batch.noisy(s.embedding.forward(&batch.ids)?, run.neftune)?;
                s.embedding.begin(&x, &batch.ids, &batch.context)
            })
        };
        let batch = |t: Tokens, context: Option<&Segments>, whole: Option<Tokens>| -> Usage {
            let mut bytes = Bytes::default();
            bytes.add(Component::Batch, context.map_or(0, |s| s.lists));
            let cuda = run.machine().cuda;
            bytes.add(Component::Batch, whole.map_or(0, |all| all.beside(t, &s.ropes, cuda)));
            bytes.add(Component::Batch, Batch::bytes(t.attended(), t.of_targets(), &s.ropes, cuda));
            bytes.into()
        };
        let pass = |t: Tokens, context: Option<&Segments>, whole: Option<Tokens>| -> Result<(Usage, Usage)> {
            Ok((batch(t, context, whole), embedding(t, false)?))
        };
        let mut input = Bytes::default();
        input.add(Component::Activations, run.train.tokens * s.d as u64 * s.dtype.size_in_bytes() as u64);
        Ok(Self {
            states: states.into(),
            skewed,
            batch: batch(run.train, run.context[0].as_ref(), run.whole(0)),
            embedding: embedding(run.train, true)?,
            embedding_backward: (s.embedding.trains() && s.units.has_embedding())
                .then(|| run.embedding_backward())
                .transpose()?,
            kinds,
            input: input.into(),
            heads: heads.iter().map(|rows| run.head(*rows as usize)).collect::<Result<_>>()?,
            eval: run.eval.map(|t| pass(t, run.context[1].as_ref(), run.whole(1))).transpose()?,
            answer: run.answers.map(|a| pass(a.part, None, None)).transpose()?,
            flights: [s.outline().training(s.lowest), s.outline().forward()].map(|v| run.flights(&v)),
            order: s.outline().training(s.lowest),
            optimizer: run
                .optimizer()?
                .max(run.states.projecting)
                .max(run.states.staging)
                .max(run.states.sent[1]),
            run,
        })
    }

    /// Lowest layer of the stage in the backward walk.
    fn first(&self) -> usize {
        let shape = self.run.shape;
        shape.lowest.map_or(usize::MAX, |u| u.max(shape.units.first).saturating_sub(1))
    }

    /// Recompute level of a layer; `None` if not walked backward.
    fn level(&self, l: usize, settings: Settings) -> Option<Level> {
        l.checked_sub(self.first()).map(|i| settings.recompute.level(i))
    }

    /// Saved activations and backward visit of a layer at its recompute level.
    fn way(&self, l: usize, settings: Settings) -> Option<&BackwardVisit> {
        self.level(l, settings).map(|level| &self.kinds[self.run.shape.of[l]].ways[level as usize])
    }

    /// Saved activations of a layer, without the input if offloaded.
    fn kept(&self, l: usize, settings: Settings) -> Option<&Usage> {
        let elsewhere = self.waits(l, settings) && self.run.machine().cuda;
        self.way(l, settings).map(|way| if elsewhere { &way.beside } else { &way.kept })
    }

    /// Whether a layer's input waits on the host: some of the layer is recomputed, and it is not the
    /// topmost (visited first in the backward pass).
    fn waits(&self, l: usize, settings: Settings) -> bool {
        let recomputed = self.level(l, settings) > Some(Level::None);
        settings.inputs.on_host && recomputed && l + 1 < self.run.shape.units.own_layers().end
    }

    /// Bytes of the lower layer's input, in transfer while layer `l` is visited.
    fn crosses(&self, l: usize, settings: Settings) -> u64 {
        if l > 0 && self.waits(l - 1, settings) { self.input.total } else { 0 }
    }

    /// Calls `f` with every point of the run, in order.
    fn each<'p>(&'p self, settings: Settings, f: &mut dyn FnMut(Point<'p>)) {
        f(Point::new(Phase::Load, self.run.states.load_transient));
        let mut flights = self.flights[0].iter().copied();
        let mut at = self.forward(settings, &mut flights, f);
        self.backward(settings, &mut at, &mut flights, f);
        f(Point::new(Phase::Step, self.optimizer));
        self.evaluation(settings, f);
        self.generation(f);
        f(Point::new(Phase::Save, self.run.states.save_transient));
    }

    /// Forward pass in training; returns the point after it.
    fn forward<'p>(
        &'p self,
        settings: Settings,
        flights: &mut Flights<'_>,
        f: &mut dyn FnMut(Point<'p>),
    ) -> Point<'p> {
        let mut at = Point::new(Phase::Forward, 0);
        at.parts = [Some(&self.batch), None];
        // other micro-batches of the pipeline, between their passes
        let kept = self.run.shape.own().filter_map(|(l, _)| self.kept(l, settings));
        let kept: u64 = kept.map(|k| k.total).sum();
        let shared_state = self.shared_state(self.run.train);
        at.waiting = (kept + self.batch.total + shared_state) * self.run.in_flight.saturating_sub(1);
        if self.run.shape.units.has_embedding() {
            at.next(flights);
            f(at.visit(0, &self.embedding));
        }
        at.shared_state = shared_state;
        for (l, kind) in self.run.shape.own() {
            at.next(flights);
            at.crossing = self.crosses(l, settings);
            f(at.visit(l + 1, &self.kinds[*kind].forward));
            at.crossing = 0;
            if self.level(l, settings).is_none() {
                at.shared_state += self.lent(l, self.run.train);
            }
            at.kept = l + 1;
            at.kept_total += self.kept(l, settings).map_or(0, |k| k.total);
        }
        at
    }

    fn backward<'p>(
        &'p self,
        settings: Settings,
        at: &mut Point<'p>,
        flights: &mut Flights<'_>,
        f: &mut dyn FnMut(Point<'p>),
    ) {
        let (count, states) = (self.run.shape.of.len(), self.run.states);
        at.phase = Phase::Backward;
        if self.run.shape.units.has_head() {
            let left = at.next(flights);
            f(at.visit(count + 1, &self.heads[settings.head].0));
            at.live = states.live_at(count + 1);
            f(self.summing(at, count + 1, left));
        }
        if self.run.shape.embedding.trains() {
            at.shared_state += self.run.input_bytes(self.run.train);
        }
        // gradients of keys and values of lower layers
        let given_above = |l: usize| self.lent_below(l, self.run.train);
        let mut given = given_above(self.run.shape.units.own_layers().end);
        at.shared_state += given;
        for (l, kind) in self.run.shape.own().rev() {
            let Some(way) = self.way(l, settings) else { break };
            at.kept = l;
            at.kept_total -= self.kept(l, settings).map_or(0, |k| k.total);
            let (usage, _) = way.backward(settings.dequantize);
            at.live = states.live_at(l + 1) + states.on_its_way(l + 1);
            let left = at.next(flights);
            at.crossing = self.crosses(l, settings);
            // `usage` already includes the layer's own gradients
            let before = Point { live: at.live - self.kinds[*kind].own, ..*at };
            f(before.visit(l + 1, usage));
            f(self.summing(at, l + 1, left));
            at.crossing = 0;
            at.shared_state -= given;
            given = given_above(l);
            at.shared_state += given;
        }
        if let Some(usage) = &self.embedding_backward {
            let ends = if self.run.keeps_ends() { 0 } else { states.ends };
            at.live = states.live_at(0) + states.on_its_way(0) + ends;
            let left = at.next(flights);
            f(at.visit(0, usage));
            f(self.summing(at, 0, left));
        }
    }

    fn evaluation<'p>(&'p self, settings: Settings, f: &mut dyn FnMut(Point<'p>)) {
        let (Some((batch, embedding)), Some(eval)) = (&self.eval, self.run.eval) else { return };
        let layers = |k: usize| self.kinds[k].eval.as_ref();
        let mut flights = self.flights[1].iter().copied();
        let mut at = Point::new(Phase::Evaluate, 0);
        at.parts[0] = Some(batch);
        self.layers_forward(&mut at, (embedding, eval, true), &layers, &mut flights, f);
        at.next(&mut flights);
        let head = self.heads[settings.head].2.as_ref().filter(|_| self.run.shape.units.has_head());
        if let Some(usage) = head {
            f(at.visit(self.run.shape.of.len() + 1, usage));
        }
    }

    fn generation<'p>(&'p self, f: &mut dyn FnMut(Point<'p>)) {
        let (Some((batch, embedding)), Some(answers)) = (&self.answer, self.run.answers) else { return };
        let layers = |k: usize| self.kinds[k].answer.as_ref();
        let mut at = Point::new(Phase::Evaluate, 0);
        at.parts[0] = Some(batch);
        at.cache = answers.cache[0];
        let mut flights = self.flights[1].iter().copied();
        self.layers_forward(&mut at, (embedding, answers.part, false), &layers, &mut flights, f);
        // logits of one token, in the compute dtype and in f32
        let model = self.run.shape;
        let logits = model.head.vocab as u64 * (self.run.machine().width + 4);
        let (unit, cache) = (model.of.len() + 1, answers.cache[1]);
        f(Point { unit, cache, ..Point::new(Phase::Evaluate, logits) });
    }

    /// Embedding and layers of a forward pass without gradients; `layers` has the visits by kind. With `lends`, layers
    /// hand on their keys.
    fn layers_forward<'p>(
        &'p self,
        at: &mut Point<'p>,
        (embedding, t, lends): (&'p Usage, Tokens, bool),
        layers: &dyn Fn(usize) -> Option<&'p Usage>,
        flights: &mut Flights<'_>,
        f: &mut dyn FnMut(Point<'p>),
    ) {
        if self.run.shape.units.has_embedding() {
            at.next(flights);
            f(at.visit(0, embedding));
        }
        at.shared_state = if lends { self.shared_state(t) } else { self.run.input_bytes(t) };
        for (l, kind) in self.run.shape.own() {
            at.next(flights);
            if let Some(usage) = layers(*kind) {
                f(at.visit(l + 1, usage));
            }
            at.shared_state += if lends { self.lent(l, t) } else { 0 };
        }
    }

    /// Bytes received from the layers below this stage: inputs, keys and values.
    fn shared_state(&self, t: Tokens) -> u64 {
        self.run.input_bytes(t) + self.lent_below(self.run.shape.units.own_layers().start, t)
    }

    /// Bytes of the keys and values of layers below `l`, used from `l` on.
    fn lent_below(&self, l: usize, t: Tokens) -> u64 {
        let of = |l: usize| attention_of(&self.run.shape.kinds[self.run.shape.of[l]])?.producer;
        let lenders: BTreeSet<usize> =
            (l..self.run.shape.of.len()).filter_map(of).filter(|p| *p < l).collect();
        lenders.into_iter().map(|p| self.lent(p, t)).sum()
    }

    /// Bytes of the keys and values handed on by layer `l`: of all tokens of a tensor group, of the rank's heads.
    fn lent(&self, l: usize, t: Tokens) -> u64 {
        let t = self.run.whole(usize::from(t != self.run.train)).unwrap_or(t);
        let a = attention_of(&self.run.shape.kinds[self.run.shape.of[l]]);
        a.filter(|a| a.lends).map_or(0, |a| self.run.key_bytes(a, t))
    }

    /// The reduction of a unit's gradients, with the weights gathered for the next visit.
    fn summing<'p>(&'p self, at: &Point<'p>, unit: usize, flight: u64) -> Point<'p> {
        let states = self.run.states;
        let given = if at.live > 0 { states.summing(unit) } else { 0 };
        let parts = [at.parts[0], Some(&self.input)];
        // the unit's update follows the sum, if it runs here
        let (given, extra) = match states.updates && self.optimizer > given {
            true => (0, self.optimizer),
            false => (given, 0),
        };
        Point { phase: Phase::Backward, unit, parts, live: at.live + given, flight, extra, ..*at }
    }

    /// Peak bytes: engine, allocator overhead, routing reserve.
    pub fn total(&self, settings: Settings) -> u64 {
        let engine = self.engine(settings);
        engine + overhead(self.run.machine(), engine) + self.routing(settings, engine)
    }

    /// Peak bytes of the engine alone.
    fn engine(&self, settings: Settings) -> u64 {
        let mut most = 0;
        self.each(settings, &mut |point| most = most.max(point.total()));
        self.states.total + most
    }

    /// Extra bytes with all tokens on the same experts.
    fn routing(&self, settings: Settings, engine: u64) -> u64 {
        self.skewed.as_ref().map_or(0, |s| s.engine(settings).saturating_sub(engine))
    }

    /// Bytes held at the peak, by component.
    pub fn peak(&self, settings: Settings) -> Peak {
        let mut at_peak: Option<Point<'_>> = None;
        let mut phases = [0; Phase::ALL.len()];
        self.each(settings, &mut |point| {
            let phase = &mut phases[point.phase as usize];
            *phase = (*phase).max(self.states.total + point.total());
            if at_peak.as_ref().is_none_or(|f| point.total() > f.total()) {
                at_peak = Some(point);
            }
        });
        let mut bytes = self.states.bytes.clone();
        let mut at = (Phase::Load, 0);
        if let Some(point) = at_peak {
            at = (point.phase, point.unit);
            point.parts.iter().flatten().for_each(|f| bytes.add_all(&f.bytes));
            (0..point.kept).filter_map(|l| self.kept(l, settings)).for_each(|k| bytes.add_all(&k.bytes));
            bytes.add(Component::Activations, point.waiting);
            point.beside(self.run.states.live_as).into_iter().for_each(|(c, b)| bytes.add(c, b));
        }
        let engine = bytes.total();
        bytes.add(Component::Routing, self.routing(settings, engine));
        bytes.add(Component::AllocatorOverhead, overhead(self.run.machine(), engine));
        Peak { phase: at.0, unit: at.1, bytes, phases }
    }
}

impl Simulation<'_> {
    /// Work of a micro-batch.
    pub fn work(&self, settings: Settings) -> Work {
        let b = CostModel::of(self.run.machine());
        let (mut sums, mut head, mut waiting) = ([Cost::default(); 3], [0.0; 2], 0.0);
        for (visit, costs) in self.visits(settings) {
            sums.iter_mut().zip(costs).for_each(|(sum, cost)| sum.add(cost, 1.0));
            waiting += self.stall(visit, costs, settings, b);
            if visit.unit > self.run.shape.of.len() {
                head = [costs[0].flops, costs[2].flops];
            }
        }
        Work { head, waiting, ..Work::of(sums, b) }
    }

    /// Stall of a visit on an input in transfer to or from the host.
    fn stall(&self, visit: Visit, costs: [Cost; 3], settings: Settings, b: CostModel) -> f64 {
        let layer = visit.unit.checked_sub(1).filter(|l| *l < self.run.shape.of.len());
        match layer.map_or(0, |l| self.crosses(l, settings)) {
            0 => 0.0,
            bytes => b.waiting(bytes, settings.inputs, Work::of(costs, b)),
        }
    }

    /// Visits of a micro-batch: work, and exchanges within them.
    pub fn by_visit(&self, settings: Settings) -> impl Iterator<Item = (Visit, f64, [Wire; 3])> + '_ {
        let b = CostModel::of(self.run.machine());
        self.visits(settings).map(move |(visit, costs)| {
            let mut all = Cost::default();
            costs.iter().for_each(|c| all.add(*c, 1.0));
            let work = Work::of(costs, b).total() + self.stall(visit, costs, settings, b);
            (visit, work, all.wire)
        })
    }

    /// Bytes received within the visits of a micro-batch: keys and values, and their gradients.
    pub fn wire(&self, settings: Settings) -> u64 {
        let received = |(_, costs): (Visit, [Cost; 3])| costs.iter().map(Cost::received).sum::<f64>();
        self.visits(settings).map(received).sum::<f64>() as u64
    }

    /// The part of [`Self::wire`] in the forward pass.
    pub fn forward_wire(&self, settings: Settings) -> u64 {
        self.visits(settings).map(|(_, [forward, ..])| forward.received()).sum::<f64>() as u64
    }

    /// Costs of the visits of a micro-batch, in their order: of their forward pass, recompute and backward pass. The
    /// visit of the head is the first of the backward pass.
    fn visits(&self, settings: Settings) -> impl Iterator<Item = (Visit, [Cost; 3])> + '_ {
        let (s, none) = (self.run.shape, Cost::default());
        let less = |mut all: Cost, first: Cost| {
            all.add(first, -1.0);
            all
        };
        let costs = move |v: &Visit| match (v.unit, v.is_backward()) {
            (0, false) => [self.embedding.cost, none, none],
            (0, true) => [none, none, self.embedding_backward.as_ref().map_or(none, |e| e.cost)],
            (unit, false) => [self.kinds[s.of[unit - 1]].forward.cost, none, none],
            (unit, true) if unit > s.of.len() => {
                let (both, forward, _) = &self.heads[settings.head];
                [*forward, none, less(both.cost, *forward)]
            }
            (unit, true) => self.way(unit - 1, settings).map_or([none; 3], |way| {
                let (both, again) = way.backward(settings.dequantize);
                [none, *again, less(both.cost, *again)]
            }),
        };
        self.order.iter().map(move |v| (*v, costs(v)))
    }

    /// All allocations; each kind appears once per place.
    pub fn listed(&self, settings: Settings) -> Vec<Allocation> {
        let mut all: Vec<Allocation> = Vec::new();
        let mut list = |phase, unit, component, bytes| all.push(Allocation { phase, unit, component, bytes });
        self.states.bytes.iter().for_each(|(c, b)| list(Phase::Load, 0, c, b));
        self.each(settings, &mut |point| {
            let [batch, visit] = point.parts;
            let batch = batch.filter(|_| point.unit == 0 && point.phase != Phase::Backward);
            for (c, b) in batch.into_iter().chain(visit).flat_map(|f| &f.listed) {
                list(point.phase, point.unit, *c, *b);
            }
            for (component, bytes) in point.beside(self.run.states.live_as) {
                if bytes > 0 {
                    list(point.phase, point.unit, component, bytes);
                }
            }
        });
        all
    }
}
