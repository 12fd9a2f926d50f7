//! Memory plan: recipe + model config + world -> bytes of each rank by component, and the peak. Needs no
//! weights and no GPU.
//!
//! Modules, in the order of the work:
//!
//! ```text
//! source    model config from a folder, the hub's cache, or built in
//! shape     shape-only model (ghosts): the engine's own modules, one layer of each kind
//! statics   weights and optimizer states of a rank, on device and host
//! space     host memory, disks, shared memory: required and available bytes
//! step      each kind of visit once on ghosts, a whole run as their sum;   ledger: components
//! work      FLOPs and other time costs of a step;   rates: throughput measured by `ft bench`
//! search    fastest execution that fits;   hints: changes that would make it fit
//! theory    the 16 bytes a parameter of the literature;   report: text and JSON
//! reading   memory for inference: `ft chat`, and the server of `serve.devices`
//! ```
//!
//! Each operation of `kernel` accounts for its own allocations and FLOPs: the plan runs the engine's
//! `forward` and `backward` on ghosts ([`ft_kernels::tensor`]). Tests compare plans with real runs: on
//! the CPU the measured peak is within 1% of the plan.

pub mod hints;
pub mod ledger;
pub mod rates;
pub mod reading;
pub mod report;
pub mod resolve;
pub mod search;
pub mod shape;
pub mod source;
pub mod space;
pub mod statics;
pub mod step;
pub mod theory;
mod visits;
pub mod work;
pub mod workload;

#[cfg(test)]
mod tests;

pub use ft_kernels::Machine;
pub use hints::Hint;
pub use ledger::{Bytes, Component, Listed, Peak, Phase};
pub use reading::{Loaded, Reading, Server};
pub use resolve::Resolved;
pub use search::{Decision, Reasons};
pub use space::{Room, Space};
pub use theory::Theory;
pub use workload::{Tokens, Workload, check_steps};

use ft_base::error::{ExitCode, Failure};
use ft_base::memory;
use ft_engine::adapt::{LearningRate, Selection};
use ft_engine::base::Base;
use ft_engine::model::Config;
use ft_engine::model::layer::Layer;
use ft_engine::model::modules::{Group, Module};
use ft_engine::walk::{Execution, Inputs as Waiting, Recomputed};
use ft_kernels::attention::Cache;
use ft_recipe::{Recipe, Weights};
use shape::Shape;
use statics::Statics;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use step::{Answers, Levels, Parts, StepInputs};
use work::Work;

/// Why a run is refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It needs more memory or disk than available.
    #[error("{0}")]
    DoesNotFit(String),
    /// The recipe asks for something the engine would ignore.
    #[error("{0}")]
    Ignored(String),
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::DoesNotFit(_) => ExitCode::DoesNotFit,
            Error::Ignored(_) => ExitCode::Usage,
        }
    }
}

/// Workloads by micro-batch size, each size measured once and cached.
pub struct Workloads<'a> {
    count: Box<dyn Fn(&Recipe) -> Workload + 'a>,
    counted: RefCell<BTreeMap<usize, Workload>>,
}

impl<'a> Workloads<'a> {
    /// Measures with `count`, called with a recipe and its `run.micro_rows`.
    pub fn new(count: impl Fn(&Recipe) -> Workload + 'a) -> Self {
        Self { count: Box::new(count), counted: RefCell::default() }
    }

    /// Workload for micro-batches of `rows` rows.
    pub fn of(&self, recipe: &Recipe, rows: usize) -> Workload {
        if let Some(w) = self.counted.borrow().get(&rows) {
            return *w;
        }
        let mut recipe = recipe.clone();
        recipe.run.micro_rows = rows.into();
        let w = (self.count)(&recipe);
        self.counted.borrow_mut().insert(rows, w);
        w
    }
}

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

/// Memory plan of one rank, and the execution chosen for it.
#[derive(Clone, Debug)]
pub struct Plan {
    /// World size.
    pub ranks: u64,
    /// Ranks in this process, as threads.
    pub local: u64,
    /// Tensor bytes received by a rank per step.
    pub wire: u64,
    pub machine: Machine,
    /// Parameters of the model, and trainable ones.
    pub parameters: (u64, u64),
    /// Device peak of a rank.
    pub peak: Peak,
    /// Usable device bytes, if known.
    pub budget: Option<u64>,
    /// Host memory, disks and shared memory.
    pub space: Space,
    /// The inference server of `serve.devices`; `space` includes its host memory.
    pub server: Option<Server>,
    /// Whether the model is a mixture of experts.
    pub mixture: bool,
    /// Number of layers.
    pub layers: usize,
    /// Layers walked backward.
    pub walked: usize,
    /// Chosen execution settings.
    pub execution: Execution,
    /// Reason for each choice.
    pub reasons: Reasons,
    pub workload: Workload,
    /// Micro-batches per step and rank.
    pub micro_batches: u64,
    /// Whether gradient buffers live from loading on. If not, a unit holds gradients during its backward
    /// visit only.
    pub keeps_gradients: bool,
    /// Why fully trained weights have no f32 master weights; `None` if they have.
    pub no_master: Option<&'static str>,
    /// Work of a micro-batch.
    pub work: Work,
    /// Learning rates of the trained parameters, highest first.
    pub learning_rates: Vec<LearningRate>,
    /// Textbook estimate, for comparison.
    pub theory: Theory,
    /// Changes to make the run fit.
    pub hints: Vec<Hint>,
}

impl Plan {
    /// Device peak in bytes.
    pub fn total(&self) -> u64 {
        self.peak.bytes.total()
    }

    /// Device peak of the engine alone, without allocator overhead and routing reserve.
    pub fn engine(&self) -> u64 {
        self.total()
            - self.peak.bytes.get(Component::AllocatorOverhead)
            - self.peak.bytes.get(Component::Routing)
    }

    /// CPU only: growth of the process over its size before loading, as engine bytes plus allocator
    /// overhead.
    pub fn process(&self) -> Option<u64> {
        (!self.machine.cuda).then(|| self.total() - self.peak.bytes.get(Component::Routing))
    }

    /// Bound on used plus reusable freed blocks of the CPU allocator, small blocks excluded.
    pub fn reused_within(&self) -> u64 {
        self.engine() + statics::reuse(self.engine())
    }

    /// Bytes of the budget to leave free, and bytes left free by the plan.
    pub fn kept_back(&self) -> Option<(u64, u64)> {
        let budget = self.budget?;
        Some((search::reserve(self.machine, budget), budget.saturating_sub(self.total())))
    }

    /// Whether the device peak is within the budget; true without a budget.
    pub fn fits_device(&self) -> bool {
        self.budget.is_none_or(|b| self.total() <= b)
    }

    /// Whether the run fits device, host and disks, as far as they are known.
    pub fn fits(&self) -> bool {
        self.fits_device() && self.space.fits() && self.fits_server()
    }

    /// Whether the server fits its devices.
    pub fn fits_server(&self) -> bool {
        self.server.as_ref().is_none_or(Server::fits)
    }

    /// Records available host memory, disk space and shared memory, and adds hints for what lacks room.
    pub fn look(&mut self, r: &Recipe, room: &Room<'_>) {
        let total = self.total();
        self.space.look(r, self.machine, total, room);
        let hints = self.space.hints(r);
        self.hints.extend(hints.into_iter().map(|(set, text)| Hint { set, text, total, built: true }));
    }

    /// Work of a rank's step. Time is this divided by the rate measured by `ft bench`.
    pub fn step_work(&self) -> f64 {
        self.work.total() * self.micro_batches as f64
    }

    /// Upper bound on the tokens of a step over all ranks.
    pub fn tokens_per_step(&self, data_ranks: u64) -> u64 {
        self.workload.train.tokens.saturating_mul(self.micro_batches).saturating_mul(data_ranks)
    }
}

/// Machine of a recipe. The compute dtype defaults to bf16 on CUDA and f32 on the CPU; [`stored`] sets
/// the width of stored weights.
pub fn machine(recipe: &Recipe, cuda: bool) -> Machine {
    let width = resolve::dtype(recipe.model.dtype, cuda).size_in_bytes() as u64;
    let threads = recipe.parallel.threads(rayon::current_num_threads());
    Machine { cuda, width, stored: width, threads: threads as u64 }
}

/// Sets the stored weight width from the model's checkpoint; `dir` is its folder, if downloaded.
pub fn stored(machine: Machine, recipe: &Recipe, config: &Config, dir: Option<&Path>) -> Machine {
    match recipe.model.weights {
        Weights::Random => machine,
        Weights::Load => Machine { stored: Base::stored_width(config, dir), ..machine },
    }
}

/// Usable device bytes of a rank: `memory.budget`, or 95% of free memory. On the CPU this is the
/// process's limit of `host` memory minus host-only bytes (process, checkpoint writer, tokenized data,
/// server), split over local ranks.
pub fn budget(
    recipe: &Recipe,
    machine: Machine,
    workload: &Workload,
    (host, server): (Option<u64>, u64),
) -> Option<u64> {
    recipe.memory.budget.or_else(|| {
        let (free, beside) = match machine.cuda {
            true => (ft_kernels::cuda::cuda_memory()?.0, 0),
            false => {
                let all = recipe.memory.host_budget.map(memory::part).or(host)?;
                (all, statics::PROCESS + statics::WRITER + workload.resident().unwrap_or(0) + server)
            }
        };
        // 5% stay free for other processes; on CUDA each rank has a device, on the CPU ranks share the
        // host
        let sharing = if machine.cuda { 1 } else { recipe.parallel.local() };
        Some((free / 20 * 19).saturating_sub(beside) / sharing)
    })
}

/// Plan state independent of the search: shapes and static bytes.
pub struct Prepared<'a> {
    inputs: &'a Inputs<'a>,
    shape: Shape,
    statics: Statics,
}

impl<'a> Prepared<'a> {
    /// Builds the shape-only model and the static bytes.
    pub fn new(inputs: &'a Inputs<'a>) -> ft_base::Result<Self> {
        let p = &inputs.recipe.parallel;
        let values = |(m, _): &(Module, _)| m.weight_values() as u64 + m.bias().unwrap_or(0) as u64;
        let apart = |(m, _): &&(Module, _)| !(inputs.selection.tied && m.group == Group::Head);
        let parameters = inputs.selection.modules.iter().filter(apart).map(values).sum();
        let statics = Statics::new(inputs.recipe, inputs.selection, inputs.machine, parameters);
        let quantize = inputs.recipe.model.quantize;
        let split = (p.tensor, p.pipeline);
        let weights = (quantize, inputs.recipe.has_rooms());
        let shape = Shape::new(inputs.config, inputs.selection, weights, inputs.machine, split)?;
        if inputs.recipe.memory.dequantize == ft_recipe::Dequantize::PerLayer
            && shape.kinds.iter().any(Layer::reads_codes)
        {
            let place = inputs.recipe.place("memory.dequantize");
            return Err(Error::Ignored(format!(
                "{place}: memory.dequantize = \"per_layer\" is not built for experts on CUDA: the products of all experts of a \
                 layer take the 4-bit codes as they are\n  hint: \"auto\" or \"per_matmul\", or run.device = \"cpu\""
            ))
            .into());
        }
        Ok(Self { inputs, shape, statics })
    }

    /// Layers walked backward.
    pub fn walked(&self) -> usize {
        self.shape.walked()
    }

    /// Vocabulary size.
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
        let beside = space::sum(&self.statics.host) + w.resident().unwrap_or(0);
        let left = self.inputs.host.unwrap_or(0).saturating_sub(beside);
        self.host_activations(w, recompute, inputs) <= left / search::OF_THE_HOST
    }

    /// Workload for micro-batches of `rows` rows.
    pub fn workload(&self, rows: usize) -> Workload {
        self.inputs.workloads.of(self.inputs.recipe, rows)
    }

    /// This rank's part of a micro-batch under context parallelism.
    fn part(&self, t: Tokens) -> Tokens {
        t.split(self.inputs.recipe.parallel.context as u64)
    }

    /// Longest prompt plus answer in evaluation. Answers are not split over ranks.
    fn answers(&self, eval: Tokens) -> Answers {
        let (c, most) = (self.inputs.config, self.inputs.recipe.generate.max_new_tokens);
        let token = Cache::bytes_of_a_token(c.kv_heads * c.head_dim, self.shape.dtype) * c.layers;
        Answers::new(eval.longest, most as u64, token as u64)
    }

    /// Simulates a run with this workload; `heads` are candidate logit chunk sizes in targets.
    pub fn parts(&self, w: Workload, heads: &[u64]) -> candle_core::Result<Parts<'_>> {
        let r = self.inputs.recipe;
        let run = StepInputs {
            shape: &self.shape,
            statics: &self.statics,
            train: self.part(w.train),
            eval: w.eval.map(|t| self.part(t)),
            answers: w.eval.filter(|_| r.generate.samples > 0).map(|t| self.answers(t)),
            // on CUDA the shuffled orders are in host memory
            orders: if self.inputs.machine.cuda { 0 } else { w.orders(r) },
            neftune: r.data.neftune,
            skewed: false,
            stages: r.parallel.pipeline as u64,
        };
        Parts::new(run, heads)
    }

    /// Tensor bytes received by a rank per step.
    fn wire(&self, micro_batches: u64) -> u64 {
        let (s, outline) = (&self.statics, self.shape.outline());
        let each = |v| outline.needs([v]).into_iter().filter_map(|u| s.comes.get(u)).sum::<u64>();
        let gathered: u64 = outline.training(self.shape.lowest).into_iter().map(each).sum();
        (s.wire[0] + gathered) * micro_batches + s.wire[1]
    }

    /// Host bytes of offloaded layer inputs; 0 on the CPU.
    fn host_activations(&self, w: &Workload, recompute: Recomputed, inputs: Waiting) -> u64 {
        if !self.inputs.machine.cuda || !inputs.on_host {
            return 0;
        }
        // the topmost layer's input stays on the device
        let waiting = recompute.layers().min(self.walked().saturating_sub(1)) as u64;
        self.part(w.train).tokens * self.shape.d as u64 * self.inputs.machine.width * waiting
    }
}

impl Plan {
    /// Plans a recipe.
    ///
    /// # Errors
    /// Inconsistent sizes of the model or of a rank's shard.
    pub fn new(i: &Inputs<'_>) -> ft_base::Result<Self> {
        let prepared = Prepared::new(i)?;
        let decision = search::choose(&prepared)?;
        let server = Server::of(i.recipe, i.config, i.selection, i.machine.stored)?;
        let mut plan = Self::of(i, &prepared, decision, server);
        if !plan.fits() {
            plan.hints = hints::hints(i, &plan);
        }
        Ok(plan)
    }

    fn of(i: &Inputs<'_>, prepared: &Prepared<'_>, d: Decision, server: Option<Server>) -> Self {
        let r = i.recipe;
        let p = &r.parallel;
        let mut host = prepared.statics.host.clone();
        let activations = prepared.host_activations(&d.workload, d.execution.recompute, d.execution.inputs);
        if activations > 0 {
            host.push(("offloaded_activations", activations));
        }
        if let Some(server) = &server {
            // ranks of a machine share one server
            host.push(("server", server.on_host.div_ceil(p.local())));
        }
        let unit = (d.execution.micro_rows * p.data).max(1);
        let micro_batches = r.run.batch_rows.div_ceil(unit) as u64;
        Self {
            ranks: p.ranks(),
            local: p.local(),
            wire: prepared.wire(micro_batches),
            machine: i.machine,
            parameters: prepared.statics.parameters,
            budget: i.budget,
            space: Space::new(r, i.selection, i.machine, &d.workload, host),
            server,
            mixture: i.config.moe.is_some(),
            layers: i.config.layers,
            walked: prepared.walked(),
            execution: d.execution,
            reasons: d.reasons,
            peak: d.peak,
            workload: d.workload,
            micro_batches,
            keeps_gradients: !r.optimizer.in_backward,
            no_master: no_master(i),
            work: d.work,
            learning_rates: i.selection.learning_rates(&r.optimizer),
            theory: Theory::new(i.selection, r.model.quantize, &r.optimizer, p),
            hints: Vec::new(),
        }
    }
}

/// Plans a recipe from its model's config alone, as `ft plan` does, for CUDA if `cuda` is set.
///
/// # Errors
/// An unknown or unsupported model, a rule without matches, an unreadable adapter.
pub fn of_recipe(recipe: &Recipe, cuda: bool) -> ft_base::Result<(Plan, source::Found)> {
    of_recipe_in(recipe, cuda, &Room::of(machine(recipe, cuda)))
}

/// Like [`of_recipe`], with explicit free memory and disk space.
///
/// # Errors
/// As [`of_recipe`].
pub fn of_recipe_in(recipe: &Recipe, cuda: bool, room: &Room<'_>) -> ft_base::Result<(Plan, source::Found)> {
    let mut found = source::find(recipe)?;
    let resolved = Resolved::new(recipe, found.config.clone(), |config| {
        resolve::selection_without_weights(recipe, config)
    })?;
    let (config, selection) = (&resolved.config, &resolved.selection);
    found.notes.extend_from_slice(&selection.notes);
    let known = workload::Known::find(recipe, found.dir.as_deref(), &found.config);
    let workloads = &match &known {
        Some(known) => Workloads::new(|r| known.workload(r)),
        None => Workloads::new(Workload::of_recipe),
    };
    let steps = workloads.of(recipe, recipe.run.micro_rows.count()).steps;
    steps.map_or(Ok(()), |steps| check_steps(recipe, steps))?;
    let place = (cuda, found.dir.as_deref());
    let inputs = Resolved::inputs(recipe, (config, selection), place, workloads, room.host)?;
    let mut plan = Plan::new(&inputs)?;
    plan.space.model(recipe, config, selection, found.weights);
    if known.is_none() {
        plan.space.tokens(recipe);
    }
    plan.look(recipe, room);
    Ok((plan, found))
}

/// Lists the engine's allocations under the given execution settings.
///
/// # Errors
/// As [`Plan::new`].
pub fn allocations(i: &Inputs<'_>, c: &Execution) -> ft_base::Result<Vec<Listed>> {
    let prepared = Prepared::new(i)?;
    let levels = Levels { recompute: c.recompute, inputs: c.inputs, dequantize: c.dequantize, head: 0 };
    Ok(prepared.parts(prepared.workload(c.micro_rows), &[c.head_rows as u64])?.listed(levels))
}

/// Why fully trained weights have no f32 master weights; `None` if they have.
fn no_master(i: &Inputs<'_>) -> Option<&'static str> {
    let rounded = statics::rounded(i.recipe, i.selection, i.machine, &i.selection.parts());
    rounded.contains(&true).then_some(match i.recipe.optimizer.master {
        ft_recipe::Master::Auto => "optimizer.master = \"auto\" with 8-bit moments",
        _ => "as optimizer.master says",
    })
}
