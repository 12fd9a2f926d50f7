//! Memory plan of one rank.

use crate::host::{Capacity, HostPlan};
use crate::inference::Server;
use crate::memory::{Component, Peak, Theory, overhead};
use crate::search::{self, Inputs, Prepared, Reasons};
use crate::time::Work;
use crate::units::bytes;
use crate::workload::{ReferencePass, Tokens, Workload};
use ft_engine::model::units::partition;
use ft_engine::params::LearningRate;
use ft_engine::walk::Execution;
use ft_kernels::Machine;
use ft_recipe::Recipe;
use serde::Serialize;

/// Memory plan of one rank, and the execution chosen for it.
#[derive(Clone, Debug)]
pub struct Plan {
    /// World size.
    pub ranks: u64,
    /// Ranks that split the rows.
    pub data_ranks: u64,
    /// Ranks in this process, as threads.
    pub local: u64,
    /// Tensor bytes received by a rank per step.
    pub wire: u64,
    /// Bytes of `wire` exchanged within passes: keys and values over parts of the same rows, rows of experts, hidden
    /// states of other stages, tokens around cut matrices, and their gradients.
    pub exchanged: u64,
    pub machine: Machine,
    /// Parameters of the model, and trainable ones.
    pub parameters: (u64, u64),
    /// Device peak of a rank.
    pub peak: Peak,
    /// The planned stage, if ranks split the layers.
    pub pipeline: Option<Pipelined>,
    /// Usable device bytes, if known.
    pub budget: Option<u64>,
    /// Host memory, disks and shared memory.
    pub space: HostPlan,
    /// The inference server of `serve.devices`; `space` includes its host memory.
    pub server: Option<Server>,
    /// Frozen matrices of attention and dense feed-forward blocks: number with products in 8-bit floats, and number in
    /// all; `None` if products are in the compute dtype.
    pub fp8: Option<(usize, usize)>,
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
    /// The pass of the reference before training.
    pub reference: Option<ReferencePass>,
    /// Micro-batches per step and rank.
    pub micro_batches: u64,
    /// Whether gradient buffers live from loading on. If not, a unit holds gradients during its backward
    /// visit only.
    pub keeps_gradients: bool,
    /// Why fully trained weights have no f32 master weights; `None` if they have.
    pub no_master: Option<&'static str>,
    /// The mean training micro-batch.
    pub mean: Tokens,
    /// Work of the mean micro-batch.
    pub work: Work,
    /// Work of an update.
    pub update: f64,
    /// Learning rates of the trained parameters, highest first.
    pub learning_rates: Vec<LearningRate>,
    /// Textbook estimate, for comparison.
    pub theory: Theory,
    /// Changes to make the run fit.
    pub hints: Vec<Hint>,
}

/// The stage of a pipeline with the highest need of memory, and the waiting time of stages.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pipelined {
    /// Layers by stage, from the bottom.
    pub stages: Vec<usize>,
    /// The planned stage, the one with the most memory.
    pub stage: usize,
    /// Micro-batches between their forward and their backward pass on it.
    pub in_flight: u64,
    /// Waiting time of a stage, as a share of a step.
    pub bubble: f64,
    /// Micro-batches of a step with a bubble of 10%.
    pub for_a_tenth: u64,
}

impl Pipelined {
    pub(super) fn of(i: &Inputs<'_>, prepared: &Prepared<'_>, micros: u64, rows: usize) -> Option<Self> {
        let p = &i.recipe.parallel;
        let all = partition(i.config, p.pipeline, &p.stages).filter(|_| p.pipeline > 1)?;
        let ahead = p.pipeline as u64 - 1;
        Some(Self {
            stage: all.iter().position(|units| *units == prepared.shape.units)?,
            stages: all.iter().map(|units| units.own_layers().len()).collect(),
            in_flight: prepared.in_flight(rows),
            bubble: ahead as f64 / (micros + ahead) as f64,
            for_a_tenth: 9 * ahead,
        })
    }

    /// The stages, and the bubble of a step of `micros` micro-batches, in words.
    pub fn words(&self, micros: u64) -> String {
        let counts = self.stages.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let enough = match micros >= self.for_a_tenth {
            true => String::new(),
            false => format!("; {} micro-batches a step make it 10%", self.for_a_tenth),
        };
        format!(
            "stages of {counts} layers; the memory is of stage {}, with {} micro-batches between their passes; stages \
             wait {:.0}% of a step of {micros} micro-batches{enough}",
            self.stage,
            self.in_flight,
            100.0 * self.bubble
        )
    }
}

/// A recipe change to make the run fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hint {
    /// Settings in command-line form, e.g. `run.micro_rows=1`.
    pub set: Vec<String>,
    /// The change in words, with device peak and cost.
    pub text: String,
    /// Device peak in bytes after the change.
    pub total: u64,
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
        self.engine() + overhead::reuse(self.engine())
    }

    /// Bytes of the budget to leave free, and bytes left free by the plan.
    pub fn kept_back(&self) -> Option<(u64, u64)> {
        let budget = self.budget?;
        Some((search::reserve(self.machine, budget), budget.saturating_sub(self.total())))
    }

    /// Name and size of the device peak's largest component.
    pub(crate) fn most(&self) -> String {
        let most = self.peak.bytes.iter().max_by_key(|(_, b)| *b);
        most.map_or_else(String::new, |(c, b)| format!("{}, {}", c.label(), bytes(b)))
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

    /// Records available host memory, disk space and shared memory, and adds hints for shortages.
    pub fn look(&mut self, r: &Recipe, room: &Capacity<'_>) {
        let total = self.total();
        self.space.look(r, self.machine, total, room);
        let hints = self.space.hints(r);
        self.hints.extend(hints.into_iter().map(|(set, text)| Hint { set, text, total }));
    }

    /// Work of a rank's step, with the wait of stages of a pipeline. Time is this divided by the rate of `ft bench`.
    pub fn step_work(&self) -> f64 {
        let ahead = self.pipeline.as_ref().map_or(0, |p| p.stages.len() as u64 - 1);
        self.work.total() * (self.micro_batches + ahead) as f64 + self.update
    }

    /// Tokens of a step over all ranks: their mean if the data is measured, else an upper bound.
    pub fn tokens_per_step(&self) -> u64 {
        self.mean.tokens.saturating_mul(self.micro_batches).saturating_mul(self.data_ranks)
    }
}
