//! What a recipe means: recipe + model config + world -> who owns which bytes, when. No weights, no GPU.
//!
//! The way of a plan:
//!
//! ```text
//! source    the model's config: a folder, the hub's cache, or built in
//! shape     the sizes that memory depends on, with what trains
//! statics   weights and optimizer states of a rank: device, host
//! space     host memory, disks, shared memory: what is taken and what there is
//! ops       what each kernel allocates;   layer: a layer's forward and backward;   step: a whole run
//! ledger    these allocations, coming and going: the peak, what it is made of, where it is
//! work      arithmetic of a step;   rates: what `ft bench` measured
//! choose    how many layers to recompute, and what would make it fit
//! theory    the textbook's 16 bytes a parameter;   report: for eyes and as JSON
//! ```
//!
//! `layer`, `ops` and `step` follow the engine's code allocation by allocation. That they agree is tested on
//! runs: on the CPU the peak of a run's allocations is within 1% of its plan.

pub mod choose;
pub mod layer;
pub mod ledger;
pub mod ops;
pub mod rates;
pub mod report;
pub mod shape;
pub mod source;
pub mod space;
pub mod statics;
pub mod step;
pub mod theory;
pub mod work;
pub mod workload;

#[cfg(test)]
mod tests;

pub use choose::{Decision, Hint};
pub use ledger::{Bytes, Component, Listed, Peak, Phase};
pub use ops::Machine;
pub use space::{Room, Space};
pub use theory::Theory;
pub use workload::Workload;

use crate::adapt::{self, Selection};
use crate::error::ExitCode;
use crate::log::memory;
use crate::model::Config;
use crate::model::modules::parameters;
use crate::recipe::{Dtype, Offload, Recipe};
use ops::Ops;
use shape::Shape;
use statics::Statics;
use step::Run;
use work::Work;

/// Why a run cannot go ahead.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It takes more than there is.
    #[error("{0}")]
    DoesNotFit(String),
}

impl Error {
    /// The exit code that this error ends the process with.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::DoesNotFit
    }
}

/// What a plan is made from.
#[derive(Clone, Debug)]
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
    pub workload: Workload,
    /// Bytes of the device that may be used, if known.
    pub budget: Option<u64>,
}

/// Who owns which bytes, when.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Ranks in all.
    pub ranks: u64,
    /// Where it would run.
    pub machine: Machine,
    /// Parameters of the model, and those that train.
    pub parameters: (u64, u64),
    /// The device at its fullest.
    pub peak: Peak,
    /// Bytes of the device that may be used.
    pub budget: Option<u64>,
    /// Host, disks and shared memory.
    pub space: Space,
    /// Layers of the model.
    pub layers: usize,
    /// Layers that backward walks, and how many of them are recomputed.
    pub walked: usize,
    /// See `walked`.
    pub recompute: usize,
    /// Why that many.
    pub reason: String,
    /// Tokens.
    pub workload: Workload,
    /// Micro-batches of a step, a rank.
    pub micro_batches: u64,
    /// Arithmetic of a micro-batch.
    pub work: Work,
    /// The textbook's figures.
    pub theory: Theory,
    /// What would make it fit.
    pub hints: Vec<Hint>,
}

impl Plan {
    /// Bytes of the device at its fullest.
    pub fn total(&self) -> u64 {
        self.peak.bytes.total()
    }

    /// Bytes of the process beyond what it held before loading; on the CPU, where they are the device's and what
    /// its allocator keeps.
    pub fn process(&self) -> Option<u64> {
        (!self.machine.cuda).then(|| self.total() + statics::ALLOCATOR)
    }

    /// Whether it fits the device's budget; without one nothing speaks against it.
    pub fn fits_device(&self) -> bool {
        self.budget.is_none_or(|b| self.total() <= b)
    }

    /// Whether it fits the device, the host and the disks, as far as they are known.
    pub fn fits(&self) -> bool {
        self.fits_device() && self.space.fits()
    }

    /// Takes down what host, disks and shared memory have, and what would make room there.
    pub fn look(&mut self, r: &Recipe, room: &Room<'_>) {
        let total = self.total();
        self.space.look(r, self.machine, total, room);
        let hints = self.space.hints(r);
        self.hints.extend(hints.into_iter().map(|(set, text)| Hint { set, text, total, built: true }));
    }

    /// Tokens of an optimizer step, over all ranks, at the most.
    pub fn tokens_per_step(&self, data_ranks: u64) -> u64 {
        self.workload.train.tokens * self.micro_batches * data_ranks
    }
}

/// Where a recipe would run: the compute dtype by device, unless it says.
pub fn machine(recipe: &Recipe, cuda: bool) -> Machine {
    let width = match recipe.model.dtype {
        Some(Dtype::F32) => 4,
        Some(Dtype::Bf16 | Dtype::F16) => 2,
        None if cuda => 2,
        None => 4,
    };
    Machine { cuda, width, threads: rayon::current_num_threads() as u64 }
}

/// Bytes of the device that a recipe may use: its budget, else what is free. On the CPU that is host memory, less
/// what the process takes of it beside the device's bytes.
pub fn budget(recipe: &Recipe, machine: Machine, workload: &Workload) -> Option<u64> {
    recipe.memory.budget.or_else(|| {
        let (free, beside) = match machine.cuda {
            true => (memory::cuda_memory()?.0, 0),
            false => {
                let all = recipe.memory.host_budget.or_else(memory::reach_bytes)?;
                (
                    all,
                    statics::PROCESS
                        + statics::ALLOCATOR
                        + statics::WRITER
                        + workload.resident().unwrap_or(0),
                )
            }
        };
        // others live here too
        Some((free / 20 * 19).saturating_sub(beside))
    })
}

/// What an allocator keeps of a device beyond what was asked for.
fn slack(machine: Machine, total: u64) -> u64 {
    if machine.cuda { total / 50 } else { 0 }
}

/// A plan's parts that do not depend on how much is recomputed.
pub(crate) struct Prepared {
    shape: Shape,
    statics: Statics,
    machine: Machine,
    train: layer::Tokens,
    eval: Option<layer::Tokens>,
    activations_on_host: bool,
    stages: u64,
}

impl Prepared {
    /// Prepares a plan.
    pub fn new(i: &Inputs<'_>) -> Self {
        let p = &i.recipe.parallel;
        let statics = Statics::new(i.recipe, i.selection, i.machine, parameters(i.config));
        let mut shape = Shape::new(i.config, i.selection, i.recipe.model.quantize);
        shape.split(p.tensor as u64, p.pipeline);
        let part = |t: layer::Tokens| t.split(p.context as u64);
        Self {
            shape,
            statics,
            machine: i.machine,
            train: part(i.workload.train),
            eval: i.workload.eval.map(part),
            activations_on_host: i.recipe.memory.offload.contains(&Offload::Activations),
            stages: p.pipeline as u64,
        }
    }

    /// Layers that backward walks.
    pub fn walked(&self) -> usize {
        self.shape.walked()
    }

    fn run(&self, recompute: usize) -> Run<'_> {
        Run {
            shape: &self.shape,
            statics: &self.statics,
            machine: self.machine,
            train: self.train,
            eval: self.eval,
            recompute,
            activations_on_host: self.activations_on_host,
            stages: self.stages,
        }
    }

    /// The device at its fullest with `recompute` layers computed again.
    pub fn peak(&self, recompute: usize) -> Peak {
        let ops = Ops { ledger: Default::default(), machine: self.machine };
        self.run(recompute).simulate(&ops);
        let mut peak = ops.ledger.peak();
        let slack = slack(self.machine, peak.bytes.total());
        peak.bytes.add(Component::Slack, slack);
        peak
    }

    /// Every allocation with `recompute` layers computed again.
    fn listed(&self, recompute: usize) -> Vec<Listed> {
        let ops = Ops { ledger: Default::default(), machine: self.machine };
        ops.ledger.list();
        self.run(recompute).simulate(&ops);
        ops.ledger.listed()
    }

    /// Arithmetic of a micro-batch with `recompute` layers computed again.
    pub fn work(&self, recompute: usize) -> Work {
        Work::new(&self.shape, self.train, recompute)
    }

    /// Bytes of a layer's inputs on the host, where activations live there.
    fn host_activations(&self) -> u64 {
        let one = self.train.tokens * self.shape.d * self.machine.width;
        if self.activations_on_host { one * self.walked() as u64 } else { 0 }
    }
}

impl Plan {
    /// Plans a recipe.
    pub fn new(i: &Inputs<'_>) -> Self {
        let prepared = Prepared::new(i);
        let decision = choose::recompute(&prepared, i.recipe.memory.recompute, i.budget);
        let mut plan = Self::of(i, &prepared, decision);
        if !plan.fits() {
            plan.hints = choose::hints(i, &plan);
        }
        plan
    }

    fn of(i: &Inputs<'_>, prepared: &Prepared, d: Decision) -> Self {
        let r = i.recipe;
        let p = &r.parallel;
        let mut host = prepared.statics.host.clone();
        let activations = prepared.host_activations();
        if activations > 0 {
            host.push(("offloaded_activations", activations));
        }
        let unit = (r.run.micro_rows * p.data).max(1);
        Self {
            ranks: (p.data * p.tensor * p.pipeline * p.expert * p.context) as u64,
            machine: i.machine,
            parameters: prepared.statics.parameters,
            budget: i.budget,
            space: Space::new(r, i.selection, i.machine, &i.workload, host),
            layers: i.config.layers,
            walked: prepared.walked(),
            recompute: d.layers,
            reason: d.reason,
            peak: d.peak,
            workload: i.workload,
            micro_batches: r.run.batch_rows.div_ceil(unit) as u64,
            work: prepared.work(d.layers),
            theory: Theory::new(i.selection, r.model.quantize, r.optimizer.name, p),
            hints: Vec::new(),
        }
    }
}

/// Plans a recipe from its model's config alone, as `ft plan` does. `cuda` says for which device.
///
/// # Errors
/// A model that cannot be found or is not supported, a rule that matches nothing, an adapter that cannot be
/// read.
pub fn of_recipe(recipe: &Recipe, cuda: bool) -> crate::Result<(Plan, source::Found)> {
    of_recipe_in(recipe, cuda, &Room::of(machine(recipe, cuda)))
}

/// As [`of_recipe`], for a machine that has `room`.
///
/// # Errors
/// As [`of_recipe`].
pub fn of_recipe_in(recipe: &Recipe, cuda: bool, room: &Room<'_>) -> crate::Result<(Plan, source::Found)> {
    let found = source::find(recipe)?;
    let selection = select(recipe, &found.config)?;
    let machine = machine(recipe, cuda);
    let workload = Workload::of_lengths(recipe, found.dir.as_deref(), &found.config)?;
    let inputs = Inputs {
        recipe,
        config: &found.config,
        selection: &selection,
        machine,
        workload,
        budget: budget(recipe, machine, &workload),
    };
    let mut plan = Plan::new(&inputs);
    plan.space.model(recipe, &found.config, &selection, found.weights);
    plan.look(recipe, room);
    Ok((plan, found))
}

/// What the engine allocates with `recompute` layers computed again, and where.
pub fn allocations(i: &Inputs<'_>, recompute: usize) -> Vec<Listed> {
    Prepared::new(i).listed(recompute)
}

fn select(recipe: &Recipe, config: &Config) -> crate::Result<Selection> {
    let selection = match (&recipe.lora.init, recipe.train.is_empty()) {
        (Some(source), true) => {
            let path = recipe.resolve(source);
            let source = if path.exists() { path.display().to_string() } else { source.clone() };
            let dir = crate::hub::fetch_adapter(&source, "main", false)?;
            Selection::from_peft(config, &adapt::peft::PeftConfig::load(&dir)?)?
        }
        _ => Selection::from_rules(config, &recipe.train)?,
    };
    if selection.trained().is_empty() {
        return Err(adapt::Error::Nothing { place: recipe.place("train").to_string() }.into());
    }
    Ok(selection)
}
