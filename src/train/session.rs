//! Training as a library: a whole run, or step by step.

use super::eval::{evaluate, probe};
use super::job::Job;
use super::preference::{ReferenceInputs, reference_model};
use super::ranks::RunInputs;
use super::step::{Gather, LossScale, StepInput, StepOutput, TrainContext, TrainedModel};
use super::{Error, Options, Outcome, output};
use crate::log::{Event, Observer};
use candle_core::Tensor;
use ft_data::{Batches, Dataset, Micro};
use ft_engine::adapters::Selection;
use ft_engine::model::Config;
use ft_engine::optim::Schedule;
use ft_engine::ranks::{self, Threads};
use ft_hub::Want;
use ft_plan::{Plan, Workload};
use ft_recipe::{Part, Recipe};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A recipe to train, as `ft run` does.
#[derive(Clone, Debug)]
pub struct Run {
    recipe: Recipe,
    options: Options,
}

impl Run {
    /// Reads a recipe file.
    ///
    /// # Errors
    /// Unreadable file; unknown keys or invalid values, with their lines.
    pub fn from_recipe(path: impl AsRef<Path>) -> ft_base::Result<Self> {
        Self::with_keys(path, &[])
    }

    /// As [`Run::from_recipe`], with keys set as on the command line: `run.output=DIR`.
    ///
    /// # Errors
    /// As [`Run::from_recipe`].
    pub fn with_keys(path: impl AsRef<Path>, keys: &[&str]) -> ft_base::Result<Self> {
        let keys: Vec<String> = keys.iter().map(ToString::to_string).collect();
        Ok(Self::new(Recipe::load(path.as_ref(), &keys)?))
    }

    /// Parses the text of a recipe. Paths are relative to the working directory.
    ///
    /// # Errors
    /// As [`Run::from_recipe`].
    pub fn from_toml(text: &str) -> ft_base::Result<Self> {
        Ok(Self::new(Recipe::parse(text, "recipe.toml", &[])?))
    }

    /// Wraps a recipe.
    pub fn new(recipe: Recipe) -> Self {
        Self { recipe, options: Options::default() }
    }

    /// Replaces the contents of the run folder.
    pub fn overwrite(mut self) -> Self {
        self.options.overwrite = true;
        self
    }

    /// Resumes from the newest whole checkpoint of the run folder.
    pub fn resume(mut self) -> Self {
        self.options.resume = true;
        self
    }

    /// Calls a function with each event of [`Run::train`]: steps, evaluations, samples, checkpoints, the end.
    /// [`ControlFlow::Break`] ends the run after the step, with a checkpoint and
    /// a result of the steps done; [`Run::resume`] goes on from there. With ranks in several processes, the
    /// first one calls.
    ///
    /// ```no_run
    /// use ft::Event;
    /// use std::ops::ControlFlow;
    ///
    /// fn main() -> ft::Result<()> {
    ///     let run = ft::Run::from_recipe("recipe.toml")?.observe(|event| match event {
    ///         Event::Evaluation { loss, .. } if *loss < 0.5 => ControlFlow::Break(()),
    ///         _ => ControlFlow::Continue(()),
    ///     });
    ///     run.train().map(drop)
    /// }
    /// ```
    pub fn observe(mut self, observer: impl FnMut(&Event<'_>) -> ControlFlow<()> + Send + 'static) -> Self {
        self.options.observer = Some(Observer::new(observer));
        self
    }

    /// Trains, with checkpoints, evaluations, metrics and a result in the run folder.
    ///
    /// # Errors
    /// As [`super::run()`].
    pub fn train(self) -> ft_base::Result<Outcome> {
        super::run(self.recipe, &self.options)
    }

    /// Selects the trained tensors by the rules of the recipe, from the config of the model alone.
    ///
    /// # Errors
    /// Model not found or not supported; rules that do not fit.
    pub fn selection(&self) -> ft_base::Result<(Config, Selection)> {
        let job = Job::open(self.recipe.clone(), Want::Config, false)?;
        Ok((job.config, job.selection))
    }

    /// Loads data and model, for training step by step on one rank. Writes nothing.
    ///
    /// # Errors
    /// Errors of recipe, model or data; several ranks.
    pub fn load(self) -> ft_base::Result<Session> {
        let job = Job::open(self.recipe, Want::Weights, false)?;
        if job.recipe.parallel.ranks() > 1 {
            let why = "a session trains on one rank\n  hint: parallel.data=1";
            return Err(Error::at(&job.recipe, "parallel.data", why).into());
        }
        let (data, eval) = job.data()?;
        job.check_rows(Some(&data), eval.as_ref())?;
        let (batches, schedule) = RunInputs::steps(&job, &data)?;
        job.check()?;
        reference_model::check(&job)?;
        let plan = job.plan(|recipe| Workload::of_data(recipe, &data, eval.as_ref()))?;
        let alone = ranks::alone();
        let reference = ReferenceInputs {
            job: &job,
            train: Some((&data, &batches)),
            eval: eval.as_ref(),
            execution: &plan.execution,
            comm: &alone,
            identity: None,
        };
        let known = reference.of_other()?;
        let mut model = TrainedModel::new(&job, job.load(true)?);
        if let Some(preferences) = &mut model.preferences {
            preferences.reference = reference.scores(known, &model.decoder, &model.params)?;
        }
        let loss_scale = LossScale::new(job.dtype, job.recipe.memory.scale);
        Ok(Session { job, alone, data, eval, batches, schedule, plan, model, loss_scale, done: 0 })
    }
}

/// A loaded model with data, trained step by step.
pub struct Session {
    job: Job,
    alone: Threads,
    data: Dataset,
    eval: Option<Dataset>,
    batches: Arc<Batches>,
    schedule: Schedule,
    plan: Plan,
    model: TrainedModel,
    loss_scale: Option<LossScale>,
    done: usize,
}

impl Session {
    /// Number of steps by the recipe.
    pub fn steps(&self) -> usize {
        self.batches.steps()
    }

    /// Number of completed steps.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Number of trained values.
    pub fn trained_values(&self) -> usize {
        self.model.params.count()
    }

    /// Memory plan of the session.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    fn gather(&self) -> Gather<'_> {
        Gather::new(&self.model.decoder, &self.model.params, &self.alone)
    }

    fn context(&self) -> TrainContext<'_> {
        TrainContext::new(&self.job, &self.model, &self.alone, self.plan.execution, self.loss_scale)
    }

    /// Runs the next step. Returns `None` after the last one.
    ///
    /// # Errors
    /// A non-finite loss or gradient; errors of the device.
    pub fn step(&mut self) -> ft_base::Result<Option<StepOutput>> {
        let step = self.done;
        if step == self.steps() {
            return Ok(None);
        }
        let (rows, cx) = (self.batches.rows(step), self.context());
        let lr = |peak: f64| self.schedule.at(step, peak);
        let output = cx.step(&StepInput { data: &self.data, rows: &rows, step: step as u64, lr: &lr })?;
        self.loss_scale = cx.loss_scale.get();
        self.done += 1;
        Ok(Some(output))
    }

    /// Mean loss and number of targets on the evaluation data, or without any, on the training data.
    ///
    /// # Errors
    /// A task with a reference, without evaluation data: the reference of the training data is of the rows in the steps
    /// alone. Errors of the device.
    pub fn evaluate(&self) -> ft_base::Result<(f64, usize)> {
        let part = if self.eval.is_some() { Part::Eval } else { Part::Train };
        if part == Part::Train && self.job.recipe.task.has_reference() {
            let why = "is missing; the reference of the training data is of the rows in the steps alone";
            return Err(Error::at(&self.job.recipe, "data.eval", format!("data.eval {why}")).into());
        }
        let data = self.eval.as_ref().unwrap_or(&self.data);
        let cx = self.context();
        let of = evaluate(&cx.scorer(&self.gather()), data, cx.objective(part), &|| 0)?;
        Ok((of.loss, of.targets))
    }

    /// Logits `[t, v]` of the tokens in a row of the training data.
    ///
    /// # Errors
    /// No such row; errors of the device.
    pub fn logits(&self, row: usize) -> ft_base::Result<Tensor> {
        let m = Micro::collate(&self.data, &[row])?;
        probe(&self.model.decoder, &self.gather(), &m, &self.job.device)
    }

    /// Writes the adapter or the model below `dir`, reads it back, and compares logits. Returns the folder,
    /// `dir/adapter` or `dir/model`.
    ///
    /// # Errors
    /// Disk errors; a result with other logits.
    pub fn save(&self, dir: impl AsRef<Path>) -> ft_base::Result<PathBuf> {
        let values = |i: usize| Ok(self.model.params.master(i)?.real()?.clone());
        output::write(&self.context(), &values, dir.as_ref(), &Micro::collate(&self.data, &[0])?.probe())
    }
}
