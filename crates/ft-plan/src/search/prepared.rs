//! Inputs of a plan, and state independent of the search.

use crate::error::Error;
use crate::host::sum;
use crate::memory::{Answers, Flow, GhostModel, ModelStates, Segments, Settings, Simulation, StepInputs};
use crate::model::{dtype, quantization};
use crate::time::CostModel;
use crate::time::actions::{Kind, StageActions, Transfer, VisitActions};
use crate::workload::{Tokens, Workload, Workloads};
use candle_core::DType;
use ft_engine::adapters::Selection;
use ft_engine::model::Config;
use ft_engine::model::layer::Layer;
use ft_engine::model::modules::Module;
use ft_engine::model::stage_boundary::{Rows, StageBoundary};
use ft_engine::model::units::{Units, partition};
use ft_engine::ranks::Axis;
use ft_engine::walk::generate::SAMPLE_TOKENS;
use ft_engine::walk::{Execution, Inputs as Waiting, Recomputed};
use ft_kernels::Machine;
use ft_kernels::ledger::Peers;
use ft_recipe::{Recipe, Task};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Divisor of host memory for automatically offloaded inputs: at most 1/2, since page-locked memory is
/// lost to other processes.
const OF_THE_HOST: u64 = 2;

/// Allowance for tokens of a chat template around a prompt.
const TEMPLATE: u64 = 256;

/// Inputs of a plan.
#[derive(Clone)]
pub struct Inputs<'a> {
    pub recipe: &'a Recipe,
    pub config: &'a Config,
    /// Modules and adapters that train.
    pub selection: &'a Selection,
    pub machine: Machine,
    pub workloads: &'a Workloads<'a>,
    /// Usable device bytes of a rank, if known.
    pub budget: Option<u64>,
    /// Usable host bytes of a rank besides the CUDA device, if known.
    pub host: Option<u64>,
    /// Models of layouts planned before, for the same recipe but for `parallel`.
    pub known: Option<&'a KnownModels>,
}

/// Models and states by layout: ranks of a stage, stages, ranks that cut matrices, ranks of experts, ZeRO stage,
/// pipeline stage.
#[derive(Default)]
pub struct KnownModels(RefCell<BTreeMap<[usize; 6], StageModel>>);

/// Model and states of a stage.
type StageModel = (Rc<GhostModel>, Rc<ModelStates>);

/// Plan state independent of the search: shapes and static bytes.
pub struct Prepared<'a> {
    pub(super) inputs: &'a Inputs<'a>,
    /// Number of the planned stage.
    stage: usize,
    pub shape: Rc<GhostModel>,
    pub states: Rc<ModelStates>,
}

impl<'a> Prepared<'a> {
    /// Builds the shape-only model of a pipeline stage, and the static bytes.
    ///
    /// # Errors
    /// Inconsistent sizes; stages not dividing the layers.
    pub fn new(inputs: &'a Inputs<'a>, stage: usize) -> ft_base::Result<Self> {
        let p = &inputs.recipe.parallel;
        let key = [p.stage() as usize, p.pipeline, p.tensor, p.expert, p.zero.into(), stage];
        let known = || inputs.known?.0.borrow().get(&key).cloned();
        let (shape, states) = match known() {
            Some(known) => known,
            None => Self::model(inputs, stage)?,
        };
        if let Some(all) = inputs.known {
            all.0.borrow_mut().insert(key, (Rc::clone(&shape), Rc::clone(&states)));
        }
        Ok(Self { inputs, stage, shape, states })
    }

    fn model(inputs: &Inputs<'_>, stage: usize) -> ft_base::Result<StageModel> {
        let p = &inputs.recipe.parallel;
        let values = |(m, _): &(Module, _)| m.weight_values() as u64 + m.bias().unwrap_or(0) as u64;
        let parameters = inputs.selection.with_weights().map(values).sum();
        let units = partition(inputs.config, p.pipeline, &p.stages).and_then(|all| all.get(stage).copied());
        let Some(units) = units else {
            return Err(Error::Ignored(format!("there is no stage {stage} of the layers")).into());
        };
        let of = (parameters, units);
        let quantize = quantization(inputs.config, inputs.recipe.model.quantize);
        let states = ModelStates::new(inputs.recipe, inputs.selection, (inputs.machine, quantize), of);
        let split = (p.tensor, p.expert);
        let weights = (quantize, inputs.recipe.has_rooms());
        // Kernels of CUDA take both half precisions alike; products of the CPU do not.
        let dtype = match dtype(inputs.recipe.model.dtype, inputs.machine.cuda) {
            DType::F16 if inputs.machine.cuda => DType::BF16,
            dtype => dtype,
        };
        let computes = (inputs.machine, dtype);
        let shape = GhostModel::new(inputs.config, inputs.selection, weights, computes, split, units)?;
        if inputs.recipe.memory.dequantize == ft_recipe::Dequantize::PerLayer
            && shape.kinds.iter().any(Layer::reads_codes)
        {
            let place = inputs.recipe.place("memory.dequantize");
            return Err(Error::Ignored(format!(
                "{place}: memory.dequantize = \"per_layer\" is not built for experts on CUDA: the \
                products of all experts of a \
                 layer take the 4-bit codes as they are\n  hint: \"auto\" or \"per_matmul\", or run.device = \"cpu\""
            ))
            .into());
        }
        Ok((Rc::new(shape), Rc::new(states)))
    }

    /// Whether another stage has the same visits and states as this one.
    pub fn is_like(&self, other: Units) -> bool {
        let (s, own) = (&self.shape, self.shape.units);
        let kinds = |u: Units| s.of.get(u.own_layers());
        // lowest trained unit, counted from the first one
        let lowest = |u: Units| s.lowest.map(|unit| unit.saturating_sub(u.first).min(u.end - u.first));
        let ends = |u: Units| (u.has_embedding(), u.has_head());
        let same = (kinds(own), ends(own), lowest(own)) == (kinds(other), ends(other), lowest(other));
        let boundary = |u: Units| [u.first, u.end].map(|unit| self.boundary(unit));
        same && boundary(own) == boundary(other)
    }

    /// Whether any weight is 4-bit.
    pub fn packed(&self) -> bool {
        self.shape.kinds.iter().any(Layer::is_packed)
    }

    /// Whether the logit chunk size leaves results bitwise equal: the head must not train (gradients are
    /// sums over chunks), and hidden size must exceed 64 (row count changes the summation order of
    /// smaller products).
    pub fn head_is_free(&self) -> bool {
        let s = &self.shape;
        !s.head.trains() && s.d > 64
    }

    /// Whether the plan may move inputs of recomputed layers to the host: on CUDA without pipeline
    /// stages, with both budgets known and `memory.offload` and `memory.recompute` left to the plan.
    pub fn inputs_are_open(&self) -> bool {
        let (i, r) = (self.inputs, self.inputs.recipe);
        let known = i.budget.is_some() && i.host.is_some() && i.machine.cuda;
        let auto = r.memory.offload.is_none() && r.memory.recompute == ft_recipe::Recompute::Auto;
        known && auto && r.parallel.pipeline == 1
    }

    /// Whether offloaded layer inputs stay within their share of the host memory left to the rank.
    pub fn host_has_room(&self, w: &Workload, recompute: Recomputed, inputs: Waiting) -> bool {
        let beside = sum(&self.states.host) + w.resident().unwrap_or(0);
        let left = self.inputs.host.unwrap_or(0).saturating_sub(beside);
        self.host_activations(w, recompute, inputs) <= left / OF_THE_HOST
    }

    /// Workload for micro-batches of `rows` rows.
    pub fn workload(&self, rows: usize) -> Workload {
        Workload { micro_rows: rows, ..self.inputs.workloads.of(self.inputs.recipe, rows) }
    }

    /// The tokens of this rank's tensor group, and their segments under context parallelism.
    fn part(&self, t: Tokens) -> (Tokens, Option<Segments>) {
        let ranks = self.inputs.recipe.parallel.context;
        if ranks == 1 {
            return (t, None);
        }
        let windows = self.inputs.config.attention.iter().map(|a| a.window);
        let (own, segments) = Segments::of(t, ranks, windows, self.inputs.machine.cuda);
        (own, Some(segments))
    }

    /// The tokens of a rank.
    fn tokens(&self, t: Tokens) -> u64 {
        self.cut(self.part(t).0).tokens
    }

    /// This rank's part of the tokens of a tensor group.
    fn cut(&self, t: Tokens) -> Tokens {
        let ranks = self.inputs.recipe.parallel.tensor;
        if ranks > 1 { t.cut(ranks) } else { t }
    }

    /// Longest prompt plus answer, of the evaluation data and of `log.samples`. Answers are not split over ranks.
    fn answers(&self, eval: Option<Tokens>) -> Option<Answers> {
        let (c, r, dtype) = (self.inputs.config, self.inputs.recipe, self.shape.dtype);
        let scored = eval.filter(|_| r.generate.samples > 0).map(|t| (t.longest, r.generate.max_new_tokens));
        // a token has at least one byte
        let logged = r.log.samples.iter().map(|text| (text.len() as u64 + TEMPLATE, SAMPLE_TOKENS));
        let lengths = scored.into_iter().chain(logged).map(|(prompt, new)| [prompt, prompt + new as u64]);
        let [prompt, all] = lengths.reduce(|a, b| [a[0].max(b[0]), a[1].max(b[1])])?;
        let own = || self.shape.units.own_layers();
        let (token, states) = (c.cache_of_a_token(own(), dtype), c.states(own(), dtype));
        Some(Answers::new(prompt, all - prompt, token as u64, states as u64))
    }

    /// Simulates a run with this workload; `heads` are candidate logit chunk sizes in targets.
    pub fn simulate(&self, w: Workload, heads: &[u64]) -> candle_core::Result<Simulation<'_>> {
        let r = self.inputs.recipe;
        let (train, of_train) = self.part(w.train);
        let (eval, of_eval) = w.eval.map(|t| self.part(t)).unzip();
        let run = StepInputs {
            shape: &self.shape,
            states: &self.states,
            train: self.cut(train),
            eval: eval.map(|t| self.cut(t)),
            context: [of_train, of_eval.flatten()],
            tensor: (r.parallel.tensor, [train, eval.unwrap_or(train)]),
            answers: self.answers(w.eval),
            // on CUDA the shuffled orders are in host memory
            orders: if self.inputs.machine.cuda { 0 } else { w.orders(r) },
            neftune: r.data.neftune,
            prefers: r.task.has_objective(),
            skewed: false,
            in_flight: self.in_flight(w.micro_rows),
            more: self.micro_batches(w.micro_rows) > self.in_flight(w.micro_rows),
        };
        Simulation::new(run, heads)
    }

    /// Micro-batches of `micro_rows` rows in a step of a rank.
    pub fn micro_batches(&self, micro_rows: usize) -> u64 {
        let r = self.inputs.recipe;
        r.run.batch_rows.div_ceil((micro_rows * r.parallel.data).max(1)) as u64
    }

    /// The mean training micro-batch.
    pub fn mean(&self, w: &Workload) -> Tokens {
        let r = self.inputs.recipe;
        let micros = self.micro_batches(w.micro_rows).saturating_mul(r.parallel.data as u64);
        w.mean(r.run.batch_rows as u64, micros)
    }

    /// Micro-batches of the stage between their forward and their backward pass.
    pub fn in_flight(&self, micro_rows: usize) -> u64 {
        let above = (self.inputs.recipe.parallel.pipeline - self.stage) as u64;
        if self.shape.goes_down() { above.min(self.micro_batches(micro_rows)) } else { 1 }
    }

    /// Time of a step divided by the time of its micro-batches: stages wait while a pipeline fills and drains.
    pub(super) fn bubble_factor(&self, micro_rows: usize) -> f64 {
        1.0 + (self.inputs.recipe.parallel.pipeline - 1) as f64 / self.micro_batches(micro_rows).max(1) as f64
    }

    /// Received bytes of hidden states from the stage below and of gradients from the one above, per micro-batch.
    fn passed(&self, w: &Workload) -> [u64; 2] {
        let (s, tokens) = (&self.shape, self.tokens(w.train));
        let rows = Rows { own: tokens as usize, attended: self.part(w.train).0.tokens as usize };
        let bytes = |comes: bool, unit: usize, back: bool| {
            let values = s.d as u64 * tokens + self.boundary(unit).values(rows, back) as u64;
            if comes { values * s.dtype.size_in_bytes() as u64 } else { 0 }
        };
        let below = bytes(!s.units.has_embedding(), s.units.first, false);
        [below, bytes(!s.units.has_head() && s.goes_down(), s.units.end, true)]
    }

    /// Values across the boundary below a unit, besides hidden states.
    fn boundary(&self, unit: usize) -> StageBoundary {
        let tensor = self.inputs.recipe.parallel.tensor;
        StageBoundary::below(self.inputs.config, unit.saturating_sub(1), tensor, self.shape.lowest == Some(0))
    }

    /// Bytes received by a rank within passes, per micro-batch: keys and values over segments, rows of experts, hidden
    /// states of other stages, tokens and sums of cut matrices.
    pub fn keys(&self, w: &Workload, e: &Execution) -> candle_core::Result<u64> {
        let p = &self.inputs.recipe.parallel;
        let [up, down] = self.passed(w);
        let passed = up + down + if self.estimates() { up } else { 0 };
        if (p.context, p.expert, p.tensor) == (1, 1, 1) {
            return Ok(passed);
        }
        let (run, settings) = self.chosen(w, e)?;
        let estimate = if self.estimates() { run.forward_wire(settings) } else { 0 };
        Ok(passed + run.wire(settings) + estimate)
    }

    /// Whether micro-batches come with a forward pass for KTO's estimate.
    fn estimates(&self) -> bool {
        self.inputs.recipe.task == Task::Kto
    }

    /// A run with a chosen execution.
    pub fn chosen(&self, w: &Workload, e: &Execution) -> candle_core::Result<(Simulation<'_>, Settings)> {
        let (recompute, inputs, dequantize) = (e.recompute, e.inputs, e.dequantize);
        let settings = Settings { recompute, inputs, dequantize, head: 0 };
        Ok((self.simulate(*w, &[e.head_rows as u64])?, settings))
    }

    /// Tensor bytes of weights and gradients received by a rank per step.
    pub fn wire(&self, micro_batches: u64) -> u64 {
        let (s, outline) = (&self.states, self.shape.outline());
        let gathered = |units: BTreeSet<usize>| s.flows.iter().filter(move |f| units.contains(&f.unit));
        let estimate = if self.estimates() { outline.forward() } else { Vec::new() };
        let visits = outline.training(self.shape.lowest).into_iter().chain(estimate);
        let gathered: u64 = visits.flat_map(|v| gathered(outline.needs([v]))).map(|f| f.gathered).sum();
        let summed: u64 = s.flows.iter().flat_map(|f| f.summed).sum();
        let updated: u64 = s.flows.iter().map(|f| f.updated).sum();
        (summed + gathered) * micro_batches + updated
    }

    /// Work of an update.
    pub fn update(&self) -> f64 {
        let values = self.states.flows.iter().map(|f| f.values).sum();
        CostModel::of(self.inputs.machine).update(values)
    }

    /// The stage's part of a step with this execution.
    pub fn actions(&self, w: &Workload, e: &Execution) -> candle_core::Result<StageActions> {
        let (run, settings) = self.chosen(w, e)?;
        let (flows, outline) = (&self.states.flows, self.shape.outline());
        let transfer = |kind, axis, bytes: f64, calls| Transfer { kind, axis, bytes, calls };
        let of = |kind, unit, bytes: fn(&Flow) -> u64| -> Vec<Transfer> {
            let here = flows.iter().filter(|f| f.unit == unit && bytes(f) > 0);
            here.map(|f| transfer(kind, f.axis, bytes(f) as f64, 1.0)).collect()
        };
        let [mut up, mut down] = [Vec::new(), Vec::new()];
        for (visit, work, wire) in run.by_visit(settings) {
            let peers = Peers::ALL.map(|p| match p {
                Peers::Context => Axis::Context,
                Peers::Tensor => Axis::Tensor,
                Peers::Experts => Axis::Expert,
            });
            let exchanges = peers.into_iter().zip(wire).filter(|(_, w)| w.calls > 0.0);
            let sums = match visit.is_backward() {
                true => [
                    of(Kind::Sum, visit.unit, |f| f.summed[0]),
                    of(Kind::Gather, visit.unit, |f| f.summed[1]),
                ],
                false => [Vec::new(), Vec::new()],
            };
            let needs = outline.needs([visit]).into_iter();
            let all = VisitActions {
                work,
                gathers: needs.flat_map(|unit| of(Kind::Gather, unit, |f| f.gathered)).collect(),
                exchanges: exchanges.map(|(a, w)| transfer(Kind::Exchange, a, w.bytes, w.calls)).collect(),
                sums,
            };
            // the head is visited on the way up
            let is_up = !visit.is_backward() || visit.unit > self.shape.of.len();
            if is_up { &mut up } else { &mut down }.push(all);
        }
        let updated = flows.iter().filter(|f| f.updated > 0);
        let updated = updated.map(|f| transfer(Kind::Gather, f.axis, f.updated as f64, 1.0)).collect();
        let update = self.update();
        Ok(StageActions {
            up,
            down,
            passed: self.passed(w).map(|bytes| bytes as f64),
            update: (update, updated),
        })
    }

    /// Host bytes of offloaded layer inputs; 0 on the CPU.
    pub fn host_activations(&self, w: &Workload, recompute: Recomputed, inputs: Waiting) -> u64 {
        if !self.inputs.machine.cuda || !inputs.on_host {
            return 0;
        }
        // the topmost layer's input stays on the device
        let waiting = recompute.layers().min(self.shape.walked().saturating_sub(1)) as u64;
        self.tokens(w.train) * self.shape.d as u64 * self.inputs.machine.width * waiting
    }
}
