//! Inputs of a plan, and its state independent of the search.

use crate::error::Error;
use crate::host::sum;
use crate::memory::{Answers, GhostModel, ModelStates, Segments, Settings, Simulation, StepInputs};
use crate::workload::{Tokens, Workload, Workloads};
use ft_engine::adapters::Selection;
use ft_engine::model::Config;
use ft_engine::model::layer::Layer;
use ft_engine::model::modules::{Group, Module};
use ft_engine::model::units::{Units, cut};
use ft_engine::walk::{Execution, Inputs as Waiting, Recomputed};
use ft_kernels::Machine;
use ft_recipe::Recipe;

/// Divisor of host memory for automatically offloaded inputs: at most 1/2, since page-locked memory is
/// lost to other processes.
const OF_THE_HOST: u64 = 2;

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
    /// Usable host bytes of a rank besides its CUDA device, if known.
    pub host: Option<u64>,
}

/// Plan state independent of the search: shapes and static bytes.
pub struct Prepared<'a> {
    pub(super) inputs: &'a Inputs<'a>,
    /// Number of the planned stage.
    stage: usize,
    shape: GhostModel,
    pub states: ModelStates,
}

impl<'a> Prepared<'a> {
    /// Builds the shape-only model of a pipeline stage, and the static bytes.
    ///
    /// # Errors
    /// Inconsistent sizes; stages that do not divide the layers.
    pub fn new(inputs: &'a Inputs<'a>, stage: usize) -> ft_base::Result<Self> {
        let p = &inputs.recipe.parallel;
        let values = |(m, _): &(Module, _)| m.weight_values() as u64 + m.bias().unwrap_or(0) as u64;
        let apart = |(m, _): &&(Module, _)| !(inputs.selection.tied && m.group == Group::Head);
        let parameters = inputs.selection.modules.iter().filter(apart).map(values).sum();
        let units = cut(inputs.config, p.pipeline, &p.stages).and_then(|all| all.get(stage).copied());
        let Some(units) = units else {
            return Err(Error::Ignored(format!("there is no stage {stage} of the layers")).into());
        };
        let of = (parameters, units);
        let states = ModelStates::new(inputs.recipe, inputs.selection, inputs.machine, of);
        let quantize = inputs.recipe.model.quantize;
        let split = (p.tensor, p.expert);
        let weights = (quantize, inputs.recipe.has_rooms());
        let shape = GhostModel::new(inputs.config, inputs.selection, weights, inputs.machine, split, units)?;
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
        Ok(Self { inputs, stage, shape, states })
    }

    /// Units of the stage.
    pub fn units(&self) -> Units {
        self.shape.units
    }

    /// Layers walked backward.
    pub fn walked(&self) -> usize {
        self.shape.walked()
    }

    /// Outputs of the head.
    pub fn vocab(&self) -> u64 {
        self.shape.head.vocab as u64
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

    /// Longest prompt plus answer in evaluation. Answers are not split over ranks.
    fn answers(&self, eval: Tokens) -> Answers {
        let (c, most) = (self.inputs.config, self.inputs.recipe.generate.max_new_tokens);
        let dtype = self.shape.dtype;
        Answers::new(eval.longest, most as u64, c.cache_of_a_token(dtype) as u64, c.states(dtype) as u64)
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
            answers: w.eval.filter(|_| r.generate.samples > 0).map(|t| self.answers(t)),
            // on CUDA the shuffled orders are in host memory
            orders: if self.inputs.machine.cuda { 0 } else { w.orders(r) },
            neftune: r.data.neftune,
            prefers: r.task.has_objective(),
            skewed: false,
            flying: self.flying(w.micro_rows),
            more: self.micro_batches(w.micro_rows) > self.flying(w.micro_rows),
        };
        Simulation::new(run, heads)
    }

    /// Micro-batches of a step on a rank, with so many rows each.
    pub fn micro_batches(&self, micro_rows: usize) -> u64 {
        let r = self.inputs.recipe;
        r.run.batch_rows.div_ceil((micro_rows * r.parallel.data).max(1)) as u64
    }

    /// Micro-batches of the stage between their forward and their backward pass.
    pub fn flying(&self, micro_rows: usize) -> u64 {
        let above = (self.inputs.recipe.parallel.pipeline - self.stage) as u64;
        if self.shape.goes_down() { above.min(self.micro_batches(micro_rows)) } else { 1 }
    }

    /// Time of a step over that of its micro-batches.
    pub(super) fn waits(&self, micro_rows: usize) -> f64 {
        1.0 + (self.inputs.recipe.parallel.pipeline - 1) as f64 / self.micro_batches(micro_rows).max(1) as f64
    }

    /// Bytes of hidden states and gradients that a rank receives from the stages beside it, per micro-batch.
    fn passed(&self, w: &Workload) -> u64 {
        let (s, tokens) = (&self.shape, self.tokens(w.train));
        let hidden = tokens * (s.d * s.dtype.size_in_bytes()) as u64;
        let below = !s.units.has_embedding();
        let above = !s.units.has_head() && s.goes_down();
        hidden * (u64::from(below) + u64::from(above))
    }

    /// Bytes that a rank receives within passes, per micro-batch: keys and values over segments, rows of experts,
    /// hidden states of other stages, tokens and sums of cut matrices.
    pub fn keys(&self, w: &Workload, e: &Execution) -> candle_core::Result<u64> {
        let p = &self.inputs.recipe.parallel;
        if (p.context, p.expert, p.tensor) == (1, 1, 1) {
            return Ok(self.passed(w));
        }
        let (recompute, inputs, dequantize) = (e.recompute, e.inputs, e.dequantize);
        let settings = Settings { recompute, inputs, dequantize, head: 0 };
        Ok(self.simulate(*w, &[e.head_rows as u64])?.wire(settings) + self.passed(w))
    }

    /// Tensor bytes of weights and gradients received by a rank per step.
    pub fn wire(&self, micro_batches: u64) -> u64 {
        let (s, outline) = (&self.states, self.shape.outline());
        let each = |v| outline.needs([v]).into_iter().filter_map(|u| s.received.get(u)).sum::<u64>();
        let gathered: u64 = outline.training(self.shape.lowest).into_iter().map(each).sum();
        (s.wire[0] + gathered) * micro_batches + s.wire[1]
    }

    /// Bytes of [`Self::wire`] that no arithmetic hides.
    pub fn exposed(&self) -> u64 {
        self.states.wire[1]
    }

    /// Host bytes of offloaded layer inputs; 0 on the CPU.
    pub fn host_activations(&self, w: &Workload, recompute: Recomputed, inputs: Waiting) -> u64 {
        if !self.inputs.machine.cuda || !inputs.on_host {
            return 0;
        }
        // the topmost layer's input stays on the device
        let waiting = recompute.layers().min(self.walked().saturating_sub(1)) as u64;
        self.tokens(w.train) * self.shape.d as u64 * self.inputs.machine.width * waiting
    }
}
