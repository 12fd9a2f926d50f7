//! What a recipe means: recipe + model config + world -> who owns which bytes, when. No weights, no GPU.
//!
//! The way of a plan:
//!
//! ```text
//! source    the model's config: a folder, the hub's cache, or built in
//! shape     the model as ghosts: the engine's own modules, one layer of each kind
//! statics   weights and optimizer states of a rank: device, host
//! space     host memory, disks, shared memory: what is taken and what there is
//! step      the walk's visits on them, each kind once, and a whole run as their sum;   ledger: what bytes are for
//! work      arithmetic of a step, and what else takes time;   rates: what `ft bench` measured
//! search    the fastest that fits;   hints: what would make it fit
//! theory    the textbook's 16 bytes a parameter;   report: for eyes and as JSON
//! reading   what a model takes that only answers: `ft chat`, and the server beside a run
//! ```
//!
//! What an operation allocates and computes is said where it is, in `kernel`: a plan runs the engine's own `forward` and
//! `backward` on ghosts ([`ft_kernels::tensor`]). That they agree is tested on runs: on the CPU the peak of a run's
//! allocations is within 1% of its plan.

pub mod hints;
pub mod ledger;
pub mod rates;
pub mod reading;
pub mod report;
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
pub use search::{Decision, Reasons};
pub use space::{Room, Space};
pub use theory::Theory;
pub use workload::{Tokens, Workload, check_steps};

use ft_engine::adapt::{self, LearningRate, Selection};
use ft_engine::base::Base;
use ft_base::error::{ExitCode, Failure};
use ft_kernels::attention::Cache;
use ft_base::memory;
use ft_engine::model::Config;
use ft_engine::model::layer::Layer;
use ft_engine::model::modules::{Group, Module};
use ft_recipe::{Dtype, Recipe, Weights};
use ft_engine::walk::{Execution, Inputs as Waiting, Recomputed};
use shape::Shape;
use statics::Statics;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use step::{Answers, Levels, Parts, StepInputs};
use work::Work;

/// Why a run cannot go ahead.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It takes more than there is.
    #[error("{0}")]
    DoesNotFit(String),
    /// The recipe asks for what would not be done.
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

/// How many tokens a micro-batch has, by its rows: each number of rows is counted once.
pub struct Workloads<'a> {
    count: Box<dyn Fn(&Recipe) -> Workload + 'a>,
    counted: RefCell<BTreeMap<usize, Workload>>,
}

impl<'a> Workloads<'a> {
    /// Counted by `count` for a recipe's `micro_rows`.
    pub fn new(count: impl Fn(&Recipe) -> Workload + 'a) -> Self {
        Self { count: Box::new(count), counted: RefCell::default() }
    }

    /// For micro-batches of `rows` rows.
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

/// What a plan is made from.
#[derive(Clone)]
pub struct Inputs<'a> {
    /// The recipe.
    pub recipe: &'a Recipe,
    /// The model.
    pub config: &'a Config,
    /// What trains.
    pub selection: &'a Selection,
    /// Where it would run.
    pub machine: Machine,
    /// Tokens.
    pub workloads: &'a Workloads<'a>,
    /// Bytes of the device that may be used, if known.
    pub budget: Option<u64>,
    /// Bytes of the host that a rank may use beside a device, if known.
    pub host: Option<u64>,
}

/// Who owns which bytes, when.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Ranks in all.
    pub ranks: u64,
    /// Of these, those that are threads of one process.
    pub local: u64,
    /// Bytes of tensors that come to a rank from the others in a step.
    pub wire: u64,
    /// Where it would run.
    pub machine: Machine,
    /// Parameters of the model, and those that train.
    pub parameters: (u64, u64),
    /// The device at its peak.
    pub peak: Peak,
    /// Bytes of the device that may be used.
    pub budget: Option<u64>,
    /// Host, disks and shared memory.
    pub space: Space,
    /// The server beside it, whose host memory `space` has too.
    pub server: Option<Server>,
    /// Whether the model is a mixture of experts.
    pub mixture: bool,
    /// Layers of the model.
    pub layers: usize,
    /// Layers that backward walks.
    pub walked: usize,
    /// What the engine obeys.
    pub execution: Execution,
    /// Why.
    pub reasons: Reasons,
    /// Tokens.
    pub workload: Workload,
    /// Micro-batches of a step, a rank.
    pub micro_batches: u64,
    /// Whether gradients are there from loading on; else each layer's live in its backward pass.
    pub keeps_gradients: bool,
    /// Why what trains in full has no f32 master weights, where it has none.
    pub no_master: Option<&'static str>,
    /// Arithmetic of a micro-batch.
    pub work: Work,
    /// The learning rates of what trains, the highest first.
    pub learning_rates: Vec<LearningRate>,
    /// The textbook's figures.
    pub theory: Theory,
    /// What would make it fit.
    pub hints: Vec<Hint>,
}

impl Plan {
    /// Bytes of the device at its peak.
    pub fn total(&self) -> u64 {
        self.peak.bytes.total()
    }

    /// Of these, the engine's own: without what the allocator holds beside them, and without the reserve for uneven
    /// routing.
    pub fn engine(&self) -> u64 {
        self.total()
            - self.peak.bytes.get(Component::AllocatorOverhead)
            - self.peak.bytes.get(Component::Routing)
    }

    /// Bytes of the process beyond what it held before loading; on the CPU, where they are the engine's and the
    /// allocator's.
    pub fn process(&self) -> Option<u64> {
        (!self.machine.cuda).then(|| self.total() - self.peak.bytes.get(Component::Routing))
    }

    /// Counted bytes that the CPU's allocator keeps used and freed blocks within: the process's, without small blocks.
    pub fn reused_within(&self) -> u64 {
        self.engine() + statics::reuse(self.engine())
    }

    /// Bytes of the budget that the choices try to leave free, and those that they do.
    pub fn kept_back(&self) -> Option<(u64, u64)> {
        let budget = self.budget?;
        Some((search::reserve(self.machine, budget), budget.saturating_sub(self.total())))
    }

    /// Whether it fits the device's budget; without one nothing speaks against it.
    pub fn fits_device(&self) -> bool {
        self.budget.is_none_or(|b| self.total() <= b)
    }

    /// Whether it fits the device, the host and the disks, as far as they are known.
    pub fn fits(&self) -> bool {
        self.fits_device() && self.space.fits() && self.fits_server()
    }

    /// Whether the server's devices have room.
    pub fn fits_server(&self) -> bool {
        self.server.as_ref().is_none_or(Server::fits)
    }

    /// Takes down what host, disks and shared memory have, and what would make room there.
    pub fn look(&mut self, r: &Recipe, room: &Room<'_>) {
        let total = self.total();
        self.space.look(r, self.machine, total, room);
        let hints = self.space.hints(r);
        self.hints.extend(hints.into_iter().map(|(set, text)| Hint { set, text, total, built: true }));
    }

    /// Work of a rank's optimizer step: its time is this over the rate that `ft bench` measures.
    pub fn step_work(&self) -> f64 {
        self.work.total() * self.micro_batches as f64
    }

    /// Tokens of an optimizer step, over all ranks, at the most.
    pub fn tokens_per_step(&self, data_ranks: u64) -> u64 {
        self.workload.train.tokens.saturating_mul(self.micro_batches).saturating_mul(data_ranks)
    }
}

/// Where a recipe would run: the compute dtype by device, unless it says; matrices are not stored in less: see [`stored`].
pub fn machine(recipe: &Recipe, cuda: bool) -> Machine {
    let width = match recipe.model.dtype {
        Some(Dtype::F32) => 4,
        Some(Dtype::Bf16 | Dtype::F16) => 2,
        None if cuda => 2,
        None => 4,
    };
    let threads = recipe.parallel.threads(rayon::current_num_threads());
    Machine { cuda, width, stored: width, threads: threads as u64 }
}

/// The same machine, for the weights of a recipe's model, which may be in `dir`.
pub fn stored(machine: Machine, recipe: &Recipe, config: &Config, dir: Option<&Path>) -> Machine {
    match recipe.model.weights {
        Weights::Random => machine,
        Weights::Load => Machine { stored: Base::stored_width(config, dir), ..machine },
    }
}

/// Bytes of the device that a recipe may use: its budget, else what is free. On the CPU that is what this process may hold
/// of `host` memory in all, less what it takes of it beside the device's bytes, and less what a server does.
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
        // others live here too
        // ranks that are threads share the host, and each has a device of its own
        let sharing = if machine.cuda { 1 } else { recipe.parallel.local() };
        Some((free / 20 * 19).saturating_sub(beside) / sharing)
    })
}

/// A plan's parts that do not depend on what is chosen.
pub struct Prepared<'a> {
    inputs: &'a Inputs<'a>,
    shape: Shape,
    statics: Statics,
}

impl<'a> Prepared<'a> {
    /// Prepares a plan.
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

    /// Layers that backward walks.
    pub fn walked(&self) -> usize {
        self.shape.walked()
    }

    /// Logits of a token.
    pub fn vocab(&self) -> u64 {
        self.shape.head.vocab as u64
    }

    /// Whether any weight is in 4 bits.
    pub fn packed(&self) -> bool {
        self.shape.kinds.iter().any(Layer::is_packed)
    }

    /// Whether the head's chunks change no bits: nothing there trains (a gradient is a sum over chunks), and its
    /// products are not so small that their number of rows decides the order of their sums.
    pub fn head_is_free(&self) -> bool {
        let s = &self.shape;
        !s.head.trains() && s.d > 64
    }

    /// Whether the plan says where inputs of recomputed layers wait: on another device than the host, in one stage, where the
    /// recipe neither says that nor what is recomputed, and both memories are known.
    pub fn inputs_are_open(&self) -> bool {
        let (i, r) = (self.inputs, self.inputs.recipe);
        let known = i.budget.is_some() && i.host.is_some() && i.machine.cuda;
        let auto = r.memory.offload.is_none() && r.memory.recompute == ft_recipe::Recompute::Auto;
        known && auto && r.parallel.pipeline == 1
    }

    /// Whether the host has room for inputs that the plan moves there, beside what else a rank has there.
    pub fn host_has_room(&self, w: &Workload, recompute: Recomputed, inputs: Waiting) -> bool {
        let beside = space::sum(&self.statics.host) + w.resident().unwrap_or(0);
        let left = self.inputs.host.unwrap_or(0).saturating_sub(beside);
        self.host_activations(w, recompute, inputs) <= left / search::OF_THE_HOST
    }

    /// Tokens of micro-batches of `rows` rows.
    pub fn workload(&self, rows: usize) -> Workload {
        self.inputs.workloads.of(self.inputs.recipe, rows)
    }

    /// This rank's part of a micro-batch.
    fn part(&self, t: Tokens) -> Tokens {
        t.split(self.inputs.recipe.parallel.context as u64)
    }

    /// The longest answer to an evaluation's samples: one process gives it alone.
    fn answers(&self, eval: Tokens) -> Answers {
        let (c, most) = (self.inputs.config, self.inputs.recipe.generate.max_new_tokens);
        let token = Cache::bytes_of_a_token(c.kv_heads * c.head_dim, self.shape.dtype) * c.layers;
        Answers::new(eval.longest, most as u64, token as u64)
    }

    /// What a run with these tokens allocates; `heads` are the head's chunks that may be chosen.
    pub fn parts(&self, w: Workload, heads: &[u64]) -> candle_core::Result<Parts<'_>> {
        let r = self.inputs.recipe;
        let run = StepInputs {
            shape: &self.shape,
            statics: &self.statics,
            train: self.part(w.train),
            eval: w.eval.map(|t| self.part(t)),
            answers: w.eval.filter(|_| r.generate.samples > 0).map(|t| self.answers(t)),
            // on CUDA they are the host's
            orders: if self.inputs.machine.cuda { 0 } else { w.orders(r) },
            neftune: r.data.neftune,
            skewed: false,
            stages: r.parallel.pipeline as u64,
        };
        Parts::new(run, heads)
    }

    /// Bytes of tensors that come to a rank from the others in a step.
    fn wire(&self, micro_batches: u64) -> u64 {
        let (s, outline) = (&self.statics, self.shape.outline());
        let each = |v| outline.needs([v]).into_iter().filter_map(|u| s.comes.get(u)).sum::<u64>();
        let gathered: u64 = outline.training(self.shape.lowest).into_iter().map(each).sum();
        (s.wire[0] + gathered) * micro_batches + s.wire[1]
    }

    /// Bytes of inputs of recomputed layers that wait on the host, where that is not the device.
    fn host_activations(&self, w: &Workload, recompute: Recomputed, inputs: Waiting) -> u64 {
        if !self.inputs.machine.cuda || !inputs.on_host {
            return 0;
        }
        // the topmost stays
        let waiting = recompute.layers().min(self.walked().saturating_sub(1)) as u64;
        self.part(w.train).tokens * self.shape.d as u64 * self.inputs.machine.width * waiting
    }
}

impl Plan {
    /// Plans a recipe.
    ///
    /// # Errors
    /// Sizes of the model, or of a rank's part of it, that do not go together.
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
            // ranks of a machine share it
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

/// Plans a recipe from its model's config alone, as `ft plan` does. `cuda` says for which device.
///
/// # Errors
/// A model that cannot be found or is not supported, a rule that matches nothing, an adapter that cannot be
/// read.
pub fn of_recipe(recipe: &Recipe, cuda: bool) -> ft_base::Result<(Plan, source::Found)> {
    of_recipe_in(recipe, cuda, &Room::of(machine(recipe, cuda)))
}

/// As [`of_recipe`], for a machine that has `room`.
///
/// # Errors
/// As [`of_recipe`].
pub fn of_recipe_in(recipe: &Recipe, cuda: bool, room: &Room<'_>) -> ft_base::Result<(Plan, source::Found)> {
    let mut found = source::find(recipe)?;
    let selection = select(recipe, &found.config)?;
    found.notes.clone_from(&selection.notes);
    let machine = stored(machine(recipe, cuda), recipe, &found.config, found.dir.as_deref());
    let known = workload::Known::find(recipe, found.dir.as_deref(), &found.config);
    let workloads = &match &known {
        Some(known) => Workloads::new(|r| known.workload(r)),
        None => Workloads::new(Workload::of_recipe),
    };
    let server = Server::of(recipe, &found.config, &selection, machine.stored)?.map_or(0, |s| s.on_host);
    let workload = workloads.of(recipe, recipe.run.micro_rows.count());
    workload.steps.map_or(Ok(()), |steps| check_steps(recipe, steps))?;
    let inputs = Inputs {
        recipe,
        config: &found.config,
        selection: &selection,
        machine,
        workloads,
        budget: budget(recipe, machine, &workload, (room.host, server)),
        host: space::beside_device(recipe, machine, (room.host, server)),
    };
    let mut plan = Plan::new(&inputs)?;
    plan.space.model(recipe, &found.config, &selection, found.weights);
    if known.is_none() {
        plan.space.tokens(recipe);
    }
    plan.look(recipe, room);
    Ok((plan, found))
}

/// What the engine allocates with a plan's choices, and where.
///
/// # Errors
/// As [`Plan::new`].
pub fn allocations(i: &Inputs<'_>, c: &Execution) -> ft_base::Result<Vec<Listed>> {
    let prepared = Prepared::new(i)?;
    let levels = Levels { recompute: c.recompute, inputs: c.inputs, dequantize: c.dequantize, head: 0 };
    Ok(prepared.parts(prepared.workload(c.micro_rows), &[c.head_rows as u64])?.listed(levels))
}

/// Why what trains in full has no f32 master weights, where it has none.
fn no_master(i: &Inputs<'_>) -> Option<&'static str> {
    let rounded = statics::rounded(i.recipe, i.selection, i.machine, &i.selection.parts());
    rounded.contains(&true).then_some(match i.recipe.optimizer.master {
        ft_recipe::Master::Auto => "optimizer.master = \"auto\" with 8-bit moments",
        _ => "as optimizer.master says",
    })
}

fn select(recipe: &Recipe, config: &Config) -> ft_base::Result<Selection> {
    let selection = match (recipe.lora.init.adapter(), recipe.train.is_empty()) {
        (Some(source), true) => {
            let path = recipe.resolve(source);
            let source = if path.exists() { path.display().to_string() } else { source.into() };
            let dir = ft_data::hub::fetch_adapter(&source, "main", false)?;
            Selection::from_peft(config, &adapt::PeftConfig::load(&dir)?)?
        }
        _ => Selection::from_rules(config, &recipe.train)?,
    };
    if selection.parts().is_empty() {
        return Err(adapt::Error::Nothing { place: recipe.place("train").to_string() }.into());
    }
    selection.check_learning_rates(recipe)?;
    Ok(selection)
}
