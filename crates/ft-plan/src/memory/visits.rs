//! Visits of the engine on ghosts. Runs every kind of visit once and records the peak.

use super::component::{Bytes, Component};
use super::ghost_model::GhostModel;
use super::states::ModelStates;
use crate::workload::Tokens;
use candle_core::{DType, Result};
use ft_engine::model::Batch;
use ft_engine::model::attention::Attention;
use ft_engine::model::batch::Context;
use ft_engine::model::context_parallel::ContextParallel;
use ft_engine::model::grad_accumulator::GradAccumulator;
use ft_engine::model::head::Objective;
use ft_engine::model::layer::{Layer, Level};
use ft_engine::model::mixer::Mixer;
use ft_engine::model::sequence_parallel::SequenceParallel;
use ft_engine::model::shared_state::SharedState;
use ft_engine::walk::generate::PART;
use ft_engine::walk::{self, Dequantize, Visit};
use ft_kernels::attention::Cache;
use ft_kernels::ledger::{Cost, Taken};
use ft_kernels::optimizer::{AdamW, adamw};
use ft_kernels::padded::Padded;
use ft_kernels::tensor::Ghost;
use ft_kernels::{Machine, Role, Tensor};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Inputs of the simulation.
#[derive(Clone, Debug)]
pub struct StepInputs<'a> {
    pub shape: &'a GhostModel,
    /// Static bytes of the rank.
    pub states: &'a ModelStates,
    /// Training micro-batch.
    pub train: Tokens,
    /// Evaluation micro-batch, if the recipe evaluates.
    pub eval: Option<Tokens>,
    /// Generation during training, if the recipe asks for it.
    pub answers: Option<Answers>,
    /// Bytes of shuffled row orders.
    pub orders: u64,
    /// NEFTune noise scale.
    pub neftune: f64,
    /// Whether gradients follow from the losses of targets, or from scores.
    pub prefers: bool,
    /// Whether all tokens choose the same experts; balanced routing if not.
    pub skewed: bool,
    /// Segments of training and evaluation micro-batches on this rank of a context group.
    pub context: [Option<Segments>; 2],
    /// Ranks of a tensor group, and their tokens in training and in evaluation.
    pub tensor: (usize, [Tokens; 2]),
    /// Micro-batches of the stage between their forward and their backward pass.
    pub in_flight: u64,
    /// Whether a step has more.
    pub more: bool,
}

/// Segments of a micro-batch on a rank of a context group.
#[derive(Clone, Debug)]
pub struct Segments {
    pub context_parallel: Arc<ContextParallel<'static>>,
    /// Bytes of their lists, on top of a micro-batch on one rank.
    pub lists: u64,
}

impl Segments {
    /// This rank's part of a micro-batch, for layers with these windows.
    pub fn of(
        t: Tokens,
        ranks: usize,
        windows: impl IntoIterator<Item = Option<usize>>,
        cuda: bool,
    ) -> (Tokens, Self) {
        let (own, context_parallel) = t.split(ranks);
        let windows: BTreeSet<Option<usize>> = windows.into_iter().collect();
        // on the host: the whole micro-batch, and indices of this rank's tokens and targets
        let host = if cuda { 0 } else { 16 * t.tokens + 12 * t.targets + 4 * own.tokens + 12 * own.targets };
        let lists = context_parallel.bytes(windows, cuda) as u64 + host;
        (own, Self { context_parallel: Arc::new(context_parallel), lists })
    }
}

/// Generation from the longest prompt, with key-value cache.
#[derive(Clone, Copy, Debug)]
pub struct Answers {
    /// Prompt tokens processed at a time.
    pub part: Tokens,
    /// Cache bytes over all layers, after the prompt and after the answer.
    pub cache: [u64; 2],
}

impl Answers {
    /// For at most `prompt` and `answer` tokens, with `token` bytes of cache a token, and `states` bytes of states.
    pub fn new(prompt: u64, answer: u64, token: u64, states: u64) -> Self {
        let part = prompt.min(PART as u64);
        let read = Cache::held(prompt, prompt + answer);
        let cache = [read, prompt + answer].map(|tokens| tokens.saturating_mul(token).saturating_add(states));
        Self { part: Tokens::of(&[usize::try_from(part).unwrap_or(usize::MAX)], 0), cache }
    }
}

/// Peak bytes, allocations and cost of a visit.
#[derive(Clone, Debug, Default)]
pub(super) struct Usage {
    pub(super) bytes: Bytes,
    pub(super) total: u64,
    pub(super) listed: Vec<(Component, u64)>,
    pub(super) cost: Cost,
}

impl Usage {
    /// Reassigns bytes of one component to another.
    fn call(&mut self, from: Component, to: Component) {
        let mut bytes = Bytes::default();
        let name = |c: Component| if c == from { to } else { c };
        self.bytes.iter().for_each(|(c, b)| bytes.add(name(c), b));
        self.bytes = bytes;
        self.listed.iter_mut().for_each(|(c, _)| *c = name(*c));
    }
}

impl From<Bytes> for Usage {
    fn from(bytes: Bytes) -> Self {
        Self { total: bytes.total(), bytes, ..Self::default() }
    }
}

impl From<Taken> for Usage {
    fn from(t: Taken) -> Self {
        let listed = t.listed.into_iter().map(|(role, bytes)| (role.into(), bytes)).collect();
        Self { listed, cost: t.cost, ..Bytes::from(t.at_peak).into() }
    }
}

/// Visits of one layer kind. Each peak includes the input, saved activations and incoming gradient of the
/// layer itself.
#[derive(Clone, Debug)]
pub(super) struct LayerVisits {
    /// Bytes of the layer's own gradients included in the backward peaks.
    pub(super) own: u64,
    pub(super) forward: Usage,
    /// By [`Level`].
    pub(super) ways: [BackwardVisit; Level::ALL.len()],
    /// Forward in evaluation.
    pub(super) eval: Option<Usage>,
    /// Forward of a prompt in generation.
    pub(super) answer: Option<Usage>,
}

/// Saved activations and backward visit at one recompute level.
#[derive(Clone, Debug)]
pub(super) struct BackwardVisit {
    /// Saved activations, input included.
    pub(super) kept: Usage,
    /// Saved activations without the input.
    pub(super) beside: Usage,
    /// Recompute plus backward, with the cost of the recompute: dequantized by tiles, and per layer.
    pub(super) backward: [(Usage, Cost); 2],
}

impl BackwardVisit {
    pub(super) fn backward(&self, d: Dequantize) -> &(Usage, Cost) {
        &self.backward[usize::from(d == Dequantize::PerLayer)]
    }
}

/// Attention of a layer, if any.
pub(super) fn attention_of(layer: &Layer) -> Option<&Attention> {
    match &layer.attn {
        Mixer::Attention(a) => Some(a),
        Mixer::Delta(_) => None,
    }
}

impl StepInputs<'_> {
    pub(super) fn machine(&self) -> Machine {
        self.shape.ledger.machine()
    }

    /// Whether gradients of a table shared by the first and last stage are allocated throughout a step. The last stage
    /// has them from the head on; the first only if a step has further backward passes.
    pub(super) fn keeps_ends(&self) -> bool {
        self.shape.units.has_head() || self.more
    }

    /// Gathered weight bytes during each visit of a pass, and after it.
    pub(super) fn flights(&self, visits: &[Visit]) -> Vec<[u64; 2]> {
        let (outline, s) = (self.shape.outline(), self.states);
        let of = |i: usize| {
            let next = visits.get(i + 1).copied();
            let both = outline.needs([visits[i]].into_iter().chain(next));
            [s.gathered(both), s.gathered(outline.needs(next))]
        };
        (0..visits.len()).map(of).collect()
    }

    /// Runs `f` on an empty ledger and returns its allocations.
    pub(super) fn visit(&self, f: impl FnOnce() -> Result<()>) -> Result<Usage> {
        self.shape.ledger.take();
        f()?;
        Ok(self.shape.ledger.take().into())
    }

    /// The tokens of a tensor group in training (0) or evaluation (1), if ranks cut matrices.
    pub(super) fn whole(&self, which: usize) -> Option<Tokens> {
        (self.tensor.0 > 1).then(|| self.tensor.1[which])
    }

    /// A micro-batch in layers, for training or evaluation.
    fn in_layers(&self, t: Tokens, train: bool) -> Result<Batch<'_>> {
        let mut batch = self.batch(t, train)?;
        let (which, (ranks, whole)) = (usize::from(!train), &self.tensor);
        batch.context.context_parallel =
            self.context[which].as_ref().map(|s| Arc::clone(&s.context_parallel));
        if *ranks > 1 {
            let context_parallel = batch.context.context_parallel.take();
            let all = Context { context_parallel, ..self.batch(whole[which], train)?.context };
            let sequence_parallel = SequenceParallel::planned(whole[which].tokens as usize, *ranks, all);
            batch.context.sequence_parallel = Some(Arc::new(sequence_parallel));
        }
        Ok(batch)
    }

    /// A micro-batch, for training or evaluation.
    pub(super) fn batch(&self, t: Tokens, train: bool) -> Result<Batch<'_>> {
        let s = self.shape;
        let dropout = train.then_some((0, 0));
        Batch::ghost(&s.ledger, t.attended(), t.of_targets(), &s.ropes, dropout)
    }

    /// Hidden states of a micro-batch or their gradient, `[t, d]`.
    fn hidden_states(&self, t: Tokens) -> Tensor {
        let s = self.shape;
        Ghost::new(&s.ledger, (t.tokens as usize, s.d), s.dtype).into()
    }

    pub(super) fn input(&self, t: Tokens) -> Tensor {
        self.shape.ledger.role(Role::Activations, || self.hidden_states(t))
    }

    /// Values of the per-layer inputs of a token; 0 without them.
    fn layer_inputs(&self) -> usize {
        let inputs = self.shape.embedding.layer_inputs.as_ref();
        inputs.and_then(|i| i.table.dims().last().copied()).unwrap_or(0)
    }

    /// Bytes handed by a micro-batch from the embedding to all layers from the lowest here on.
    pub(super) fn input_bytes(&self, t: Tokens) -> u64 {
        let (layers, first) = (self.shape.of.len(), self.shape.units.own_layers().start);
        let width = self.layer_inputs() / layers.max(1) * (layers - first.min(layers));
        t.tokens * (width * self.shape.dtype.size_in_bytes()) as u64
    }

    /// Bytes of the keys and values of a layer.
    pub(super) fn key_bytes(&self, a: &Attention, t: Tokens) -> u64 {
        t.tokens * (2 * a.kv_heads * a.head_dim * self.shape.dtype.size_in_bytes()) as u64
    }

    /// The context of a pass at a layer of a micro-batch.
    fn at_layer<'b>(&self, layer: &Layer, t: Tokens, batch: &Batch<'b>) -> Context<'b> {
        let attended = batch.context.sequence_parallel.as_ref().map_or(t.tokens as usize, |s| s.tokens());
        batch.context.for_pass(&self.shared_state(Some(layer), t, attended), None)
    }

    /// State between the layers at a layer of a micro-batch with keys of `attended` tokens, counted by
    /// [`super::simulation`].
    fn shared_state(&self, layer: Option<&Layer>, t: Tokens, attended: usize) -> Arc<SharedState> {
        let (s, rows) = (self.shape, t.tokens as usize);
        let ghost = |shape: &[usize]| Tensor::from(Ghost::weight(&s.ledger, shape, s.dtype));
        let inputs = match self.layer_inputs() {
            0 => None,
            width => Some((ghost(&[rows, width]), s.embedding.trains())),
        };
        let keys = layer.and_then(attention_of).and_then(|a| {
            let l = a.producer.or_else(|| a.lends.then_some(a.layer))?;
            let keys = || ghost(&[attended, a.kv_heads, a.head_dim]);
            Some((l, [keys(), keys()]))
        });
        Arc::new(SharedState::ghost(inputs, keys))
    }

    pub(super) fn embedding_backward(&self) -> Result<Usage> {
        let (s, batch) = (self.shape, self.batch(self.train, true)?);
        let dy = || self.hidden_states(self.train);
        let context = batch.context.for_pass(&self.shared_state(None, self.train, 0), None);
        self.visit(|| {
            s.embedding.backward(&batch, &context, self.neftune, &dy(), &GradAccumulator::new(&s.grads, 0))
        })
    }

    /// Temporary bytes of the optimizer on the device.
    pub(super) fn optimizer(&self) -> Result<u64> {
        let (s, n) = (self.shape, self.states.largest_group as usize);
        let flat = |dtype| Tensor::from(Ghost::weight(&s.ledger, n, dtype));
        let (f, copy) = (flat(DType::F32), if s.dtype == DType::F32 { None } else { Some(flat(s.dtype)) });
        let k = AdamW { lr: 0.0, betas: [0.0; 2], eps: 0.0, weight_decay: 0.0, t: 1, grad_scale: 1.0 };
        Ok(self.visit(|| adamw(&f, &f, &f, &f, copy.as_ref(), &k))?.total)
    }

    /// Runs the visits of `Walk::train` and `Walk::eval` for one layer kind.
    pub(super) fn kind(&self, layer: &Layer, unit: usize) -> Result<LayerVisits> {
        let (ledger, t) = (&self.shape.ledger, self.train);
        let batch = self.in_layers(t, true)?;
        let context = || self.at_layer(layer, t, &batch);
        let taken = || -> Usage {
            let mut full: Usage = ledger.take().into();
            full.call(Component::Gradients, self.states.live_as);
            full
        };
        let live = |roles| Usage::from(Bytes::from(roles));

        let forward = self.visit(|| layer.forward(&self.input(t), &context(), None, None).map(drop))?;
        let own = self.states.own_live(unit);
        let accum = || GradAccumulator::ghost(&self.shape.grads, ledger, self.states.own_live_by_flat(unit));
        let way = |level: Level| -> Result<BackwardVisit> {
            let (mut kept, mut beside) = (Usage::default(), Usage::default());
            let mut backward = |dequantize| -> Result<(Usage, Cost)> {
                let (ctx, x) = (&context(), self.input(t));
                let rest = layer.forward(&x, ctx, None, None)?.1.keep(level);
                kept = live(ledger.keep());
                drop(x);
                beside = live(ledger.keep());
                let x = self.input(t);
                let rank = layer.fused_rank_back(&x, ctx);
                let dy = Padded::empty(&x, (t.tokens as usize, self.shape.d), rank, self.shape.dtype)?;
                ledger.take();
                let routing = rest.routing();
                let dequantized = walk::dequantized_layer(layer, dequantize, level, routing.as_deref())?;
                drop(routing);
                let layer = dequantized.as_ref().unwrap_or(layer);
                let saved = layer.recompute(&x, ctx, level, rest)?;
                let again = ledger.cost();
                drop(layer.backward((&x, saved), &dy, ctx, &accum(), None, rank)?);
                Ok((taken(), again))
            };
            let tiles = backward(Dequantize::PerMatmul)?;
            let visit = match level >= Level::FeedForward && layer.is_packed() {
                true => backward(Dequantize::PerLayer)?,
                false => tiles.clone(),
            };
            Ok(BackwardVisit { kept, beside, backward: [tiles, visit] })
        };
        let [a, b, c, d] = Level::ALL.map(way);
        let ways = [a?, b?, c?, d?];
        let eval = |t: Tokens, batch: Batch<'_>| {
            let context = self.at_layer(layer, t, &batch);
            self.visit(|| layer.forward(&self.input(t), &context, None, None).map(drop))
        };
        let answer = self.answers.map(|a| eval(a.part, self.batch(a.part, false)?)).transpose()?;
        let eval = self.eval.map(|t| eval(t, self.in_layers(t, false)?)).transpose()?;
        Ok(LayerVisits { own, forward, ways, eval, answer })
    }

    /// Runs the head with logit chunks of at most `rows` targets.
    pub(super) fn head(&self, rows: usize) -> Result<(Usage, Cost, Option<Usage>)> {
        let s = self.shape;
        let live = self.states.live_at(s.of.len() + 1);
        let visit = |t: Tokens, backward: bool| {
            let batch = self.batch(t, backward)?;
            let mut full = self.visit(|| {
                let x = self.input(t);
                let accum = GradAccumulator::ghost(&s.grads, &s.ledger, vec![live]);
                if t.targets > rows as u64 && backward {
                    // all chunks but the first find the buffer allocated
                    accum.flat(0)?;
                }
                let n = batch.target_count;
                let n = if s.head.scores { n * s.head.vocab } else { n };
                let mut weigh = |_: &[Tensor]| {
                    Ok(s.ledger.role(Role::Workspace, || Ghost::new(&s.ledger, n, DType::F32)).into())
                };
                let objective: Option<&mut Objective<'_>> =
                    if self.prefers { Some(&mut weigh) } else { None };
                match backward {
                    true => s.head.train(&x, &batch, rows, (1.0, objective), &accum).map(drop),
                    false => s.head.loss(&x, &batch, rows, None).map(drop),
                }
            })?;
            full.call(Component::Gradients, self.states.live_as);
            Ok::<_, candle_core::Error>(full)
        };
        let forward = visit(self.train, false)?.cost;
        Ok((visit(self.train, true)?, forward, self.eval.map(|t| visit(t, false)).transpose()?))
    }
}
