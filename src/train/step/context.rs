//! Inputs and result of a step.

use super::{LossScale, Ranks};
use crate::train::distill;
use crate::train::job::Job;
use crate::train::objective::Objective;
use crate::train::preference::{Preferences, Scorer};
use candle_core::Device;
use ft_data::Dataset;
use ft_engine::model::Decoder;
use ft_engine::model::batch::Distillation;
use ft_engine::optim::{Optimizer, Rate};
use ft_engine::params::Params;
use ft_engine::ranks::Comm;
use ft_engine::walk::{Execution, Hooks, Load, RouterLosses};
use ft_recipe::Part;
use serde_json::{Map, Value};
use std::cell::Cell;

/// A loaded model, with all states of training.
pub struct TrainedModel {
    pub decoder: Decoder,
    /// Trained tensors and optimizer states.
    pub params: Params,
    pub optimizer: Optimizer,
    /// The task, if it compares or rates completions.
    pub preferences: Option<Preferences>,
}

impl TrainedModel {
    /// Creates the optimizer of a loaded model. Without a reference yet.
    pub fn new(job: &Job, (decoder, params): (Decoder, Params)) -> Self {
        let optimizer = Optimizer::new(&params, &job.recipe.optimizer);
        Self { decoder, params, optimizer, preferences: Preferences::of(&job.recipe) }
    }
}

/// Inputs of all steps of a run on one rank.
pub struct TrainContext<'a> {
    pub job: &'a Job,
    pub model: &'a TrainedModel,
    /// All ranks; [`ft_engine::ranks::alone`] for a single one.
    pub comm: &'a dyn Comm,
    /// Execution chosen by the plan.
    pub execution: Execution,
    /// Loss scale, for f16. Changed by [`TrainContext::accumulate`] and [`TrainContext::update`].
    pub loss_scale: Cell<Option<LossScale>>,
}

impl<'a> TrainContext<'a> {
    /// Creates the context of a run with an initial loss scale.
    pub fn new(
        job: &'a Job,
        model: &'a TrainedModel,
        comm: &'a dyn Comm,
        execution: Execution,
        loss_scale: Option<LossScale>,
    ) -> Self {
        Self { job, model, comm, execution, loss_scale: Cell::new(loss_scale) }
    }

    /// Device to compute on.
    pub fn device(&self) -> &'a Device {
        &self.job.device
    }

    /// Forward passes of all ranks, with `hooks`.
    pub fn scorer<'b>(&'b self, hooks: &'b dyn Hooks) -> Scorer<'b> {
        let (decoder, ranks, distillation) = (&self.model.decoder, self.ranks(), self.distillation());
        Scorer { decoder, ranks, hooks, execution: &self.execution, device: self.device(), distillation }
    }

    /// All ranks, on their mesh.
    pub fn ranks(&self) -> Ranks<'a> {
        Ranks::of(self.comm, &self.job.recipe.parallel)
    }

    /// The task, for losses of whole documents, on a part of the data.
    pub fn objective(&self, part: Part) -> Option<Objective<'a>> {
        Objective::of(&self.job.recipe, self.model.preferences.as_ref(), part)
    }

    /// Settings of task "distill".
    pub fn distillation(&self) -> Option<Distillation> {
        distill::settings(&self.job.recipe)
    }

    /// Factor on the loss in the backward pass; 1 without loss scaling.
    pub(super) fn loss_factor(&self) -> f64 {
        self.loss_scale.get().map_or(1.0, LossScale::factor)
    }

    /// Coefficients of the router losses.
    pub fn router(&self) -> RouterLosses {
        let r = &self.job.recipe.router;
        RouterLosses { aux: r.aux_loss, z: r.z_loss }
    }
}

/// Rows and learning rates of a step.
#[derive(Clone, Copy)]
pub struct StepInput<'a> {
    /// Training data.
    pub data: &'a Dataset,
    /// Row indices.
    pub rows: &'a [usize],
    /// Step, from 0.
    pub step: u64,
    /// Learning rates.
    pub lr: Rate<'a>,
}

/// Result of a step.
#[derive(Clone, Debug)]
pub struct StepOutput {
    /// Mean loss over the targets of the step, by weight; over the pairs or rated completions.
    pub loss: f64,
    /// Load-balancing loss and z-loss, averaged over micro-batches, before multiplication by the
    /// coefficients.
    pub router_losses: (f64, f64),
    /// Number of tokens per expert.
    pub load: Load,
    /// Gradient norm before clipping, without the loss scale.
    pub grad_norm: f64,
    /// Number of tokens processed.
    pub tokens: usize,
    /// Number of targets.
    pub targets: usize,
    /// Further metrics of the step, by name.
    pub metrics: Map<String, Value>,
    /// True for the trained tensors reached by the backward pass.
    pub reached: Vec<bool>,
}
