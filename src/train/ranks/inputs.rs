//! Inputs of a run, the same on every rank.

use crate::train::job::{Job, rows};
use crate::train::memory::Planned;
use crate::train::preference::ReferenceInputs;
use crate::train::step::{LossScale, TrainContext, TrainedModel};
use ft_data::{Batches, Dataset};
use ft_engine::optim::Schedule;
use ft_engine::ranks::Comm;
use ft_engine::walk::Execution;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Inputs of a run, the same on every rank.
#[derive(Clone)]
pub struct RunInputs {
    pub job: Arc<Job>,
    pub data: Arc<Dataset>,
    pub eval: Option<Arc<Dataset>>,
    /// Rows of the steps.
    pub batches: Arc<Batches>,
    pub schedule: Schedule,
    pub execution: Execution,
    /// Folder of the checkpoint to resume.
    pub checkpoint: Option<PathBuf>,
    /// Initial or resumed loss scale, for f16.
    pub loss_scale: Option<LossScale>,
    /// Plan, for out-of-memory reports.
    pub planned: Arc<Planned>,
}

impl RunInputs {
    /// Divides the rows of a dataset into steps, with the learning-rate schedule over them.
    pub fn steps(job: &Job, data: &Dataset) -> ft_base::Result<(Arc<Batches>, Schedule)> {
        let batches = rows::batches(&job.recipe, data)?;
        let schedule = Schedule::new(&job.recipe.optimizer, batches.steps());
        Ok((Arc::new(batches), schedule))
    }

    /// Context of a rank with a loaded model.
    pub fn context<'a>(&'a self, model: &'a TrainedModel, comm: &'a dyn Comm) -> TrainContext<'a> {
        TrainContext::new(&self.job, model, comm, self.execution, self.loss_scale)
    }

    /// Reference of the run on a rank, with the identity of the run on the first one.
    pub fn reference<'a>(
        &'a self,
        identity: Option<&'a BTreeMap<String, String>>,
        comm: &'a dyn Comm,
    ) -> ReferenceInputs<'a> {
        let (job, execution, eval) = (&self.job, &self.execution, self.eval.as_deref());
        ReferenceInputs { job, train: Some((&self.data, &self.batches)), eval, execution, comm, identity }
    }
}
