//! All checks of a run before the model is loaded.

use super::folder::{ended, exists, filled, keep_micro_rows};
use super::log;
use super::options::Options;
use super::server;
use super::signals::Signals;
use crate::log::read_metrics;
use crate::train::Error;
use crate::train::bench::probe_before;
use crate::train::checkpoint::identity::Identity;
use crate::train::checkpoint::state::{self, State};
use crate::train::eval::{EvalHistory, check_questions};
use crate::train::job::{self, Job, rows};
use crate::train::layout::{CHECKPOINTS, is_whole, result_dir};
use crate::train::memory::{MemoryMonitor, limits};
use crate::train::preference::reference_model;
use crate::train::ranks::{self, RemoteRanks, RunInputs};
use crate::train::step::LossScale;
use ft_base::store::AtomicFolder;
use ft_base::store::checkpoint::{self, Checkpoint, Checkpoints};
use ft_base::terminal::{tell, warn};
use ft_data::{Batches, Dataset};
use ft_engine::optim::Schedule;
use ft_hub::Want;
use ft_plan::{Plan, Workload};
use ft_recipe::{Recipe, Run};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Keys that decide dtypes and shapes of the moments.
const MOMENTS: [&str; 2] = ["optimizer.name", "optimizer.galore_rank"];

/// A checked run.
pub struct PreparedRun {
    pub inputs: Arc<RunInputs>,
    /// The run folder.
    pub dir: PathBuf,
    /// Checkpoint to resume.
    pub resume: Option<Resume>,
    pub identity: Identity,
    pub checkpoints: Checkpoints,
    pub signals: Signals,
    pub options: Options,
}

/// Outcome of the checks.
pub enum Prepared {
    /// The run is finished: folder of the result.
    Finished(PathBuf),
    /// The run begins or resumes.
    Ready(Box<PreparedRun>, Box<MemoryMonitor>),
}

impl PreparedRun {
    /// Number of steps completed before this process.
    pub fn done(&self) -> u64 {
        self.resume.as_ref().map_or(0, |r| r.state.step)
    }

    /// Number of steps of the whole run.
    pub fn total(&self) -> usize {
        self.inputs.batches.steps()
    }
}

/// A checkpoint to resume.
pub struct Resume {
    checkpoint: Checkpoint,
    state: State,
}

impl Resume {
    /// Finds the checkpoint to resume. Warns about unusable newer ones.
    fn find(checkpoints: &Checkpoints, options: &Options) -> ft_base::Result<Option<Self>> {
        let newest = match options.step {
            Some(step) => Some(checkpoints.whole(step)?),
            None if options.resume => checkpoints.newest_whole()?,
            None => None,
        };
        let Some(checkpoint) = newest else { return Ok(None) };
        checkpoint.warnings.iter().for_each(|w| warn(w));
        let state = state::read(&checkpoint.path, checkpoint.step)?;
        Ok(Some(Self { checkpoint, state }))
    }

    /// Refuses a run that would compute something other than the checkpointed run.
    fn check(&self, identity: &Identity, options: &Options, job: &Job) -> ft_base::Result<()> {
        let (old, new) = (&self.state.identity, identity.get()?);
        state::check_accepted(old, new, &options.accept_change)?;
        let changes = state::changes(old, new, &options.accept_change);
        if changes.is_empty() {
            return Ok(());
        }
        let same_moments = MOMENTS.iter().all(|key| old.get(*key) == new.get(*key));
        let hint = match same_moments && state::holds(&self.checkpoint.path, &job.selection.trained())? {
            true => "put it back, or say --accept-change KEY for each",
            false => "put it back: the checkpoint has other tensors or moments; --overwrite starts anew",
        };
        let dir = job.recipe.run.output.display().to_string();
        Err(Error::Changed { dir, changes: changes.join("\n"), hint }.into())
    }

    /// Returns true if no step is left, by number or by early stopping on evaluations of the data with hash `eval`.
    fn is_finished(&self, dir: &Path, total: usize, (run, eval): (&Run, Option<&str>)) -> bool {
        let stopped_early = || {
            let mut events = read_metrics(&dir.join("metrics.jsonl")).unwrap_or_default();
            EvalHistory::only_of(&mut events, eval);
            EvalHistory::of(run.best, &events).is_exhausted(run.patience)
        };
        ended(dir) && (self.state.step >= total as u64 || stopped_early())
    }
}

/// Resolves a recipe, and checks job, data, memory and the checkpoint to resume.
pub fn prepare(
    recipe: Recipe,
    options: &Options,
    remote: Option<&RemoteRanks<'_>>,
    signals: Signals,
) -> ft_base::Result<Prepared> {
    let dir = recipe.run.output.clone();
    let CheckedInputs { mut job, other, data, eval, batches, schedule, result, saved } =
        check_inputs(recipe, options, remote)?;
    if remote.is_none() {
        // other processes would wait, or measure the same card at the same time
        probe_before(&job, options.program.as_deref());
    }
    let planned = |job: &Job| job.plan(|recipe| Workload::of_data(recipe, &data, eval.as_ref()));
    // A finished run must return before memory and disk space are checked.
    let goes_on = options.resume && saved;
    let fresh = if goes_on { None } else { Some(planned(&job)?) };
    fresh.as_ref().map_or(Ok(()), |plan| limits::check(&job, plan))?;
    // Fails early if the result folder is not writable.
    drop(AtomicFolder::begin(&result)?);
    let checkpoints = Checkpoints::open(&dir.join(CHECKPOINTS))?;
    let resume = Resume::find(&checkpoints, options)?;
    if options.resume {
        keep_micro_rows(&mut job.recipe, resume.as_ref().map(|r| &r.state), &dir);
    }
    let plan = match fresh {
        Some(fresh) if !options.resume => fresh,
        // without a checkpoint, another number of rows is free
        Some(fresh) => Some(planned(&job)?).filter(Plan::fits).unwrap_or(fresh),
        None => planned(&job)?,
    };
    // Fixes the planned value, for the run and for the resolved recipe on disk.
    job.recipe.run.micro_rows = plan.execution.micro_rows.into();
    let (job, data, eval) = (Arc::new(job), Arc::new(data), eval.map(Arc::new));
    let reference = other.map(|other| reference_model::hash(&other)).transpose()?;
    let identity = Identity::new(&job, &data, reference);
    if job.recipe.model.cache.is_some() {
        // The cache is keyed by the hash of the model, so hashing cannot overlap with loading.
        identity.get()?;
    }
    let eval_hash = eval.as_deref().map(|e| e.hash.as_str());
    if check_resume(resume.as_ref(), &identity, options, &job, (&result, batches.steps(), eval_hash))? {
        return Ok(Prepared::Finished(result));
    }
    if goes_on {
        limits::check(&job, &plan)?;
    }
    let monitor = MemoryMonitor::begin(&plan, &job);
    let first = LossScale::new(job.dtype, job.recipe.memory.scale);
    let resumed = resume.as_ref().and_then(|r| r.state.loss_scale);
    let inputs = RunInputs {
        loss_scale: first.map(|first| resumed.unwrap_or(first)),
        job,
        data,
        eval,
        batches,
        schedule,
        execution: plan.execution,
        checkpoint: resume.as_ref().map(|r| r.checkpoint.path.clone()),
        planned: monitor.planned(),
    };
    let (inputs, options) = (Arc::new(inputs), options.clone());
    let run = PreparedRun { inputs, dir, resume, identity, checkpoints, signals, options };
    Ok(Prepared::Ready(Box::new(run), Box::new(monitor)))
}

/// Checks the checkpoint to resume against this run. Returns true if the run is finished. `total` is the number
/// of steps, `eval` the hash of the evaluation data.
fn check_resume(
    resume: Option<&Resume>,
    identity: &Identity,
    options: &Options,
    job: &Job,
    (result, total, eval): (&Path, usize, Option<&str>),
) -> ft_base::Result<bool> {
    let dir = &job.recipe.run.output;
    let Some(r) = resume else {
        if options.resume {
            tell(&format!("no checkpoint in {} yet: starting from the beginning", dir.display()));
        }
        return Ok(false);
    };
    r.check(identity, options, job)?;
    let has_result = options.step.is_none() && is_whole(result);
    if has_result && r.is_finished(dir, total, (&job.recipe.run, eval)) {
        return Ok(true);
    }
    tell(&format!("going on from {} (step {} of {total})", r.checkpoint.path.display(), r.state.step));
    Ok(false)
}

/// Job and data of a run, checked without a plan.
struct CheckedInputs {
    job: Job,
    /// Another model as reference.
    other: Option<Job>,
    data: Dataset,
    eval: Option<Dataset>,
    batches: Arc<Batches>,
    schedule: Schedule,
    /// Folder of the result.
    result: PathBuf,
    /// True if the run folder holds checkpoints.
    saved: bool,
}

/// Resolves a recipe, and checks it against this machine, the run folder and the data.
fn check_inputs(
    recipe: Recipe,
    options: &Options,
    remote: Option<&RemoteRanks<'_>>,
) -> ft_base::Result<CheckedInputs> {
    let dir = recipe.run.output.clone();
    let device = job::device(recipe.run.device)?;
    let cuda = device.is_cuda();
    ranks::check(&recipe, cuda, None)?;
    server::check(&recipe, cuda, options.program.as_deref())?;
    log::check(&recipe)?;
    limits::before_download(&recipe, &device)?;
    let job = Job::open(recipe, Want::Weights, true)?;
    job::tell_idle(&job.recipe, Some((cuda, job.dtype)), Some(&job.config), true);
    let other = reference_model::check(&job)?;
    remote.map_or(Ok(()), RemoteRanks::opened)?;
    let result = result_dir(&job.selection, &dir);
    let saved = checkpoint::any(&dir.join(CHECKPOINTS));
    // An input folder of the recipe is protected too, if the result would overwrite it.
    if filled(&result) && !options.overwrite && !saved {
        return Err(exists(&dir, &result));
    }
    let (data, eval) = job.data()?;
    job.check_rows(Some(&data), eval.as_ref())?;
    let (batches, schedule) = RunInputs::steps(&job, &data)?;
    rows::tell_steps(&job.recipe, &batches);
    job.check()?;
    if let Some(adapter) = &job.adapter {
        job::tell_init_quantize(&job.recipe, &job.config, adapter)?;
    }
    job::samples(&job.recipe, job.tokenizer.as_deref())?;
    check_questions(&job.recipe, job.tokenizer.as_deref(), eval.as_ref())?;
    Ok(CheckedInputs { job, other, data, eval, batches, schedule, result, saved })
}
