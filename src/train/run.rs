//! `ft run`: the loop over steps, with evaluation, checkpoints, signals, and the result at the end.

use super::answers;
use super::best::Best;
use super::earlier::{clear, ended, exists, filled, keep_micro_rows, refuse_earlier};
use super::exhausted::start_threads_of;
use super::finished::Inputs;
use super::guard::{self, Still};
use super::identity::Identity;
use super::ranks::{self, Followers, Next};
use super::running::Running;
use super::server::{self, Server};
use super::signals::Signals;
use super::state::{self, State};
use super::step::Setup;
use super::watch::{self, Watch};
use super::{Error, Job, LossScale, Stepped, job, output, rows};
use crate::log::{Metrics, TensorBoard, read_metrics, unix_time};
use candle_core::Device;
use ft_base::memory;
use ft_base::memory::place;
use ft_base::store::checkpoint::{self, Checkpoint, Checkpoints};
use ft_base::store::{self, NewFolder, RunLock};
use ft_base::terminal::{Progress, tell, warn};
use ft_data::hub::Want;
use ft_data::{Batches, Dataset, Micro};
use ft_engine::base::Base;
use ft_engine::comm::Comm;
use ft_engine::optim::{Optimizer, Schedule};
use ft_engine::params::{Params, build::unreached};
use ft_engine::walk::Load;
use ft_plan::{Plan, Workload};
use ft_recipe::{Launch, Meeting, Recipe};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Folder of the checkpoints in a run folder.
pub const CHECKPOINTS: &str = "checkpoints";
/// Number of first steps of a process in which running out of memory leads to a new plan.
const YOUNG: usize = 3;

/// Options of a run outside the recipe.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Resume from the newest whole checkpoint.
    pub resume: bool,
    /// Remove the leftovers of an earlier run.
    pub overwrite: bool,
    /// Recipe keys that may differ from the checkpoint.
    pub accept_change: Vec<String>,
    /// With `resume`: the step of the checkpoint; `None` for the newest.
    pub step: Option<u64>,
    /// Executable to start as `ft serve` for `serve.devices`, namely `ft` itself.
    pub program: Option<PathBuf>,
}

/// Outcome of a run without errors.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The run trained and wrote a result.
    Done {
        /// Folder of the adapter or model.
        result: PathBuf,
    },
    /// The run was already finished.
    Already {
        /// Folder of the adapter or model.
        result: PathBuf,
    },
    /// This process ran a rank other than the first. The first rank holds the result.
    Followed,
}

/// Ranks in other processes, as seen by the first rank.
pub trait Others {
    /// Collectives of the ranks.
    fn comm(&self) -> &dyn Comm;

    /// Reports that the recipe is resolved and the run folder is locked. Other ranks then look for them.
    ///
    /// # Errors
    /// Lost rank.
    fn opened(&self) -> ft_base::Result<()>;

    /// Reports that the run begins. Other ranks then load the model.
    ///
    /// # Errors
    /// Lost rank; a rank with other settings or data.
    fn begin(&self, shared: &ranks::Shared) -> ft_base::Result<()>;
}

/// Trains as the recipe says.
///
/// # Errors
/// Before the first step: errors of recipe, model or data. Later: full disk, non-finite loss, signal.
/// Checkpoints written before the error remain valid.
pub fn run(recipe: Recipe, options: &Options) -> ft_base::Result<Outcome> {
    let launch = Launch::of_env();
    // An explicit device allows this check before other processes are contacted.
    if recipe.run.device != ft_recipe::Device::Auto {
        ranks::check_comm(&recipe, recipe.run.device == ft_recipe::Device::Cuda)?;
    }
    match (recipe.parallel.comm, &launch) {
        (ft_recipe::Comm::Threads, Some(Launch { world, .. })) => {
            let hint = format!("leave parallel.comm out, and parallel.data={world}; or no launcher");
            Err(Error::Usage(format!(
                "{}: {world} processes were started, and parallel.comm = \"threads\" is for the ranks of one\n  hint: {hint}",
                recipe.place("parallel.comm")
            ))
            .into())
        }
        (ft_recipe::Comm::Mpi, Some(Launch { meeting: Meeting::At(..), .. })) => {
            let what = "parallel.comm = \"mpi\", and the launcher has set RANK, WORLD_SIZE and MASTER_ADDR";
            let hint = "leave parallel.comm out, or start the processes with mpirun";
            Err(Error::Usage(format!("{}: {what}\n  hint: {hint}", recipe.place("parallel.comm"))).into())
        }
        (ft_recipe::Comm::Mpi, _) | (_, Some(_)) => super::processes::run(recipe, options, launch.as_ref()),
        _ => first(recipe, options, None),
    }
}

/// As [`run`], on the first rank; `others` are the ranks in other processes.
///
/// # Errors
/// As [`run`]; lost rank.
pub(super) fn first(
    recipe: Recipe,
    options: &Options,
    others: Option<&dyn Others>,
) -> ft_base::Result<Outcome> {
    let signals = Signals::catch()?;
    let dir = recipe.run.output.clone();
    // Held until the end, so that the state of the run folder cannot change in between.
    let _lock = RunLock::take(&dir)?;
    refuse_earlier(&recipe, options)?;
    let inputs = Inputs::look(&recipe).map(|i| (i, recipe.clone()));
    if options.resume
        && options.step.is_none()
        && let Some(result) = inputs.as_ref().and_then(|(i, _)| i.finished(&dir))
    {
        return Ok(Outcome::Already { result });
    }
    let finished = |result: &Path| inputs.iter().for_each(|(i, recipe)| i.keep(recipe, &dir, result));
    watch::before_download(&recipe)?;
    let mut job = Job::open(recipe, Want::Weights, true)?;
    ranks::check(&job)?;
    server::check(&job.recipe, job.device.is_cuda(), options.program.as_deref())?;
    others.map_or(Ok(()), Others::opened)?;
    let result = output::result_dir(&job, &dir);
    // An input folder of the recipe is protected too, if the result would overwrite it.
    if filled(&result) && !options.overwrite && !checkpoint::any(&dir.join(CHECKPOINTS)) {
        return Err(exists(&dir, &result));
    }
    let (data, eval) = job.data()?;
    let batches = rows::batches(&job.recipe, &data)?;
    let total = batches.steps();
    job.check()?;
    job::sample(&job.recipe, job.tokenizer.as_deref())?;
    answers::check(&job)?;
    let planned = |job: &Job| job.plan(|recipe| Workload::of_data(recipe, &data, eval.as_ref()));
    // A finished run must return before memory and disk space are checked.
    let goes_on = options.resume && checkpoint::any(&dir.join(CHECKPOINTS));
    let fresh = if goes_on { None } else { Some(planned(&job)?) };
    if let Some(plan) = &fresh {
        watch::check(&job, plan)?;
    }
    // Fails early if the result folder is not writable.
    drop(NewFolder::begin(&result)?);
    let checkpoints = Checkpoints::open(&dir.join(CHECKPOINTS))?;
    let newest = match options.step {
        Some(step) => Some(checkpoints.whole(step)?),
        None if options.resume => checkpoints.newest_whole()?,
        None => None,
    };
    for w in newest.iter().flat_map(|c| &c.warnings) {
        warn(w);
    }
    let reached = newest.as_ref().map(|c| state::read(&c.path)).transpose()?;
    if options.resume {
        keep_micro_rows(&mut job.recipe, reached.as_ref(), &dir);
    }
    let plan = match fresh {
        Some(plan) if !options.resume => plan,
        _ => planned(&job)?,
    };
    // Fixes the planned value, for the run and for the resolved recipe on disk.
    job.recipe.run.micro_rows = plan.execution.micro_rows.into();
    let (job, data, eval) = (Arc::new(job), Arc::new(data), eval.map(Arc::new));
    let identity = Identity::new(&job, &data);
    if job.recipe.model.cache.is_some() {
        // The cache is keyed by the hash of the model, so hashing cannot overlap with loading.
        identity.get()?;
    }
    let mut done = 0;
    if let (Some(c), Some(s)) = (&newest, &reached) {
        state::check_accepted(&s.identity, identity.get()?, &options.accept_change)?;
        let changes = state::changes(&s.identity, identity.get()?, &options.accept_change);
        if !changes.is_empty() {
            return Err(Error::Changed { dir: dir.display().to_string(), changes: changes.join("\n") }.into());
        }
        done = s.step;
        let early = || {
            let events = read_metrics(&dir.join("metrics.jsonl")).unwrap_or_default();
            Best::of(&events).exhausts(job.recipe.run.patience)
        };
        if options.step.is_none() && ended(&dir) && result.is_dir() && (done >= total as u64 || early()) {
            finished(&result);
            return Ok(Outcome::Already { result });
        }
        tell(&format!("going on from {} (step {done} of {total})", c.path.display()));
    } else if options.resume {
        tell(&format!("no checkpoint in {} yet: starting from the beginning", dir.display()));
    }

    if goes_on {
        watch::check(&job, &plan)?;
    }
    let watch = Watch::begin(&plan, &job);
    let planned = watch.planned();
    let start = Start {
        job: &job,
        plan: &plan,
        data: &data,
        eval: eval.as_ref(),
        batches: &batches,
        dir: &dir,
        newest: newest.as_ref(),
        done,
        loss_scale: LossScale::new(job.dtype, job.recipe.memory.scale)
            .map(|first| reached.and_then(|s| s.loss_scale).unwrap_or(first)),
        identity: &identity,
        checkpoints: &checkpoints,
        signals: &signals,
        overwrite: options.overwrite,
        program: options.program.as_deref(),
    };
    let outcome = train(&start, watch, others).map_err(|e| planned.explain(e))?;
    finished(&result);
    Ok(outcome)
}

/// Inputs of the loop after all checks.
struct Start<'a> {
    job: &'a Arc<Job>,
    plan: &'a Plan,
    data: &'a Arc<Dataset>,
    eval: Option<&'a Arc<Dataset>>,
    batches: &'a Batches,
    dir: &'a Path,
    /// Checkpoint to resume, and the number of completed steps.
    newest: Option<&'a Checkpoint>,
    done: u64,
    /// Initial or resumed loss scale.
    loss_scale: Option<LossScale>,
    identity: &'a Identity<'a>,
    checkpoints: &'a Checkpoints,
    signals: &'a Signals,
    /// Replace the contents of the run folder.
    overwrite: bool,
    /// Executable of the server.
    program: Option<&'a Path>,
}

/// Starts the ranks, and trains.
fn train(start: &Start<'_>, watch: Watch, others: Option<&dyn Others>) -> ft_base::Result<Outcome> {
    let planned = watch.planned();
    let shared = |base: &Base| ranks::Shared {
        job: Arc::clone(start.job),
        base: base.clone(),
        data: Arc::clone(start.data),
        eval: start.eval.map(Arc::clone),
        execution: start.plan.execution,
        checkpoint: start.newest.map(|c| c.path.clone()),
        loss_scale: start.loss_scale,
        planned: Arc::clone(&planned),
    };
    if let Some(others) = others {
        return lead_on(start, watch, others.comm(), &mut |base| others.begin(&shared(base)));
    }
    let (comm, mut others) = ranks::group(&start.job.recipe.parallel);
    let mut followers = None;
    let mut follow = |base: &Base| {
        followers = Some(Followers::start(std::mem::take(&mut others), &Arc::new(shared(base)))?);
        Ok(())
    };
    let outcome = match comm.world() {
        1 => lead_on(start, watch, &comm, &mut follow),
        // All ranks run on threads with separate thread pools.
        _ => std::thread::scope(|s| {
            let lead = s.spawn(|| {
                let _threads = start_threads_of(0, &start.job.recipe.parallel)?;
                lead_on(start, watch, &comm, &mut follow)
            });
            lead.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        }),
    };
    // Other ranks stop waiting for this one.
    drop(comm);
    followers.into_iter().for_each(|f| f.end(&outcome));
    outcome
}

/// Runs the first rank: starts the others with `follow`, then leads them.
fn lead_on(
    start: &Start<'_>,
    watch: Watch,
    comm: &dyn Comm,
    follow: &mut dyn FnMut(&Base) -> ft_base::Result<()>,
) -> ft_base::Result<Outcome> {
    let base = start.job.base_to_load()?;
    start.identity.loading(&base)?;
    follow(&base)?;
    ranks::on_device(start.job, comm, |comm| lead(start, watch, comm, base))
}

/// Loads the model, runs the steps, writes the result.
fn lead(start: &Start<'_>, mut watch: Watch, comm: &dyn Comm, base: Base) -> ft_base::Result<Outcome> {
    let Start { job, plan, eval, batches, dir, newest, done, .. } = *start;
    let total = batches.steps();
    let (decoder, params) = ranks::load(job, &base, newest.map(|c| c.path.as_path()), comm)?;
    start.identity.loaded(&base)?;
    drop(base);
    watch.loaded(&params);
    if start.overwrite {
        // Deletes old files only after all checks have passed.
        clear(job, dir)?;
        Checkpoints::open(&dir.join(CHECKPOINTS))?;
    }
    store::write_atomic(&dir.join("recipe.toml"), job.recipe.to_toml().as_bytes())?;
    let from = newest.map(|_| done);
    let mut metrics = Metrics::open(&dir.join("metrics.jsonl"), from)?;
    if job.recipe.log.csv {
        metrics.tabulate()?;
    }
    if job.recipe.log.tensorboard {
        metrics.show_in(TensorBoard::open(dir, from)?);
    }
    let events = read_metrics(&dir.join("metrics.jsonl"))?;
    let best = match job.recipe.run.keep_best {
        true => Best::of_whole(events, start.checkpoints, done),
        false => Best::of(&events),
    };
    let optimizer = Optimizer::new(&params, &job.recipe.optimizer);
    let mut r = Running {
        setup: Setup::new(job, (&decoder, &params, &optimizer), plan.execution, start.loss_scale, comm),
        job,
        eval: eval.map(|e| &**e),
        metrics,
        progress: Progress::new(done, total as u64),
        watch,
        load: (0, Load::default()),
        schedule: Schedule::new(&job.recipe.optimizer, total),
        rates: params.learning_rates(&job.recipe.optimizer),
        signals: start.signals,
        done,
        saved: newest.map(|_| done),
        received: 0,
        best,
        seconds: 0.0,
        tokens: 0,
        server: Server::start(start.program, job, dir),
    };
    // From here on, signals are deferred until a checkpoint is saved.
    start.signals.hold();
    let outcome = steps(start, &mut r).and_then(|()| finish(start, &mut r));
    outcome.map_err(|e| r.stopped(e))
}

/// Runs the steps; a checkpoint and an evaluation follow a step when due.
fn steps(start: &Start<'_>, r: &mut Running<'_>) -> ft_base::Result<()> {
    let Start { job, data, batches, done, identity, .. } = *start;
    let (run, total) = (&job.recipe.run, batches.steps());
    let due = |every: usize, count: usize| count == total || (every > 0 && count.is_multiple_of(every));
    r.start(data, total, identity.get()?)?;
    if done > 0 && due(run.eval_every, done as usize) && !r.metrics.has("eval") {
        // Repeats an evaluation interrupted after the checkpoint.
        evaluate(start, r)?;
    }
    let (mut still, mut reached) = (Still::default(), false);
    for step in done as usize..total {
        if r.best.exhausts(run.patience) {
            r.progress.line(&format!(
                "stopped after step {}: {} evaluations in a row were no better than step {}'s (run.patience)",
                r.done,
                run.patience,
                r.best.lowest().map_or(0, |(step, _)| step)
            ));
            break;
        }
        halt(start, r)?;
        let (started, rows) = (Instant::now(), batches.rows(step));
        let young = step - (done as usize) < YOUNG;
        let s = match r.step(data, &rows, step, young) {
            Err(e) => return Err(given_up(start, r, e)),
            Ok(s) => s,
        };
        if !reached && s.targets > 0 {
            check_reached(r.setup.params, &s)?;
            reached = true;
        }
        let count = step + 1;
        let last = count == total;
        r.done = count as u64;
        r.stepped(&s, step, started.elapsed().as_secs_f64())?;
        r.look_at_server()?;
        r.loaded(&s.load, last)?;
        let row = || Ok(Micro::collate(data, &rows[..rows.len().min(1)])?.probe());
        still.look(&s, &r.setup, row, r.done, last)?;
        if due(run.save_every, count) {
            save(start, r)?;
        }
        // The checkpoint comes first, so that an error in the evaluation loses no step.
        if due(run.eval_every, count) {
            evaluate(start, r)?;
        }
    }
    halt(start, r)
}

/// Evaluates. On a non-finite loss, saves a checkpoint and then returns the error.
fn evaluate(start: &Start<'_>, r: &mut Running<'_>) -> ft_base::Result<()> {
    match r.evaluate() {
        Ok(true) if start.job.recipe.run.keep_best => {
            save(start, r)?;
            // The previous best checkpoint is no longer needed.
            Ok(start.checkpoints.keep_to(r.done, start.job.recipe.run.keep, Some(r.done))?)
        }
        Err(e) if matches!(e.of(), Some(Error::EvaluationOf { .. })) => save(start, r).and(Err(e)),
        outcome => outcome.map(drop).map_err(|e| given_up(start, r, e)),
    }
}

/// Converts the error of an abandoned operation to the error of the signal, after saving a checkpoint.
fn given_up(start: &Start<'_>, r: &mut Running<'_>, e: ft_base::Error) -> ft_base::Error {
    match e.of() {
        Some(Error::Abandoned(asked)) => {
            start.signals.hear(*asked);
            halt(start, r).err().unwrap_or(e)
        }
        _ => e,
    }
}

/// After a signal, saves a checkpoint and returns the signal as an error.
fn halt(start: &Start<'_>, r: &mut Running<'_>) -> ft_base::Result<()> {
    let Some((name, code)) = start.signals.seen() else { return Ok(()) };
    let step = r.done;
    let saved = match step {
        0 => {
            "before the first step was done: there is nothing to save\n  hint: the same command starts again"
                .into()
        }
        _ => {
            save(start, r)?;
            format!(
                "after step {step}; a checkpoint is written\n  hint: the same command with --resume goes on"
            )
        }
    };
    r.progress.finish();
    Err(Error::Signal { name, saved, code }.into())
}

/// Writes the result after the last step.
fn finish(start: &Start<'_>, r: &mut Running<'_>) -> ft_base::Result<Outcome> {
    let Start { job, data, dir, signals, .. } = *start;
    // A run resumed from the last step may have sampled already.
    if r.done > start.done || !r.metrics.has("sample") {
        r.sample()?;
    }
    halt(start, r)?;
    // Early stopping leaves the last step unsaved.
    save(start, r)?;
    // From here on, a signal loses nothing: the result appears whole or not at all.
    signals.release();
    let mut of = r.done;
    if let Some((step, loss)) = r.best.get().filter(|(step, _)| job.recipe.run.keep_best && *step != of) {
        let folder = start.checkpoints.whole(step)?.path;
        ranks::tell_next(r.setup.comm, &Next::Load(folder.clone()))?;
        ranks::take_up(r.setup.params, &folder, r.setup.comm)?;
        r.progress.line(&format!("the result is that of step {step}: evaluation loss {loss:.4}"));
        of = step;
    }
    r.progress.finish();
    place::enter(place::Phase::Save, 0);
    let probe = Micro::collate(data, &[0])?.probe();
    let params = r.setup.params;
    let result = if params.has_masters() {
        let values = |i: usize| Ok(params.master(i)?.real()?.clone());
        output::write(job, &r.setup, &values, dir, &probe)?
    } else {
        // Without master weights, ranks hold shards; the checkpoint of the last step holds all values.
        let files = state::weights(&start.checkpoints.folder(of))?;
        let values = |i: usize| {
            let name = &params.tensors[i].name;
            Ok(files.tensor(name, params.stored(i)?, &Device::Cpu)?)
        };
        output::write(job, &r.setup, &values, dir, &probe)?
    };
    ranks::tell_next(r.setup.comm, &Next::End)?;
    r.watch.look();
    if let Some(warning) = r.watch.verdict() {
        r.progress.line(&warning);
    }
    r.metrics.write(&json!({
        "event": "end", "step": r.done, "of_step": of, "result": result, "peak_host_bytes": memory::peak_host_bytes(),
        "peak_device_bytes": r.watch.peak(), "planned_peak_bytes": r.watch.plan().engine(),
        "memory": r.watch.compared(), "time": unix_time(),
    }))?;
    r.told(&result);
    Ok(Outcome::Done { result })
}

/// Saves a checkpoint of the completed steps, unless it exists.
fn save(start: &Start<'_>, r: &mut Running<'_>) -> ft_base::Result<()> {
    let (step, params) = (r.done, r.setup.params);
    if r.saved == Some(step) {
        return Ok(());
    }
    place::enter(place::Phase::Save, 0);
    let draft = start.checkpoints.begin(step)?;
    ranks::tell_next(r.setup.comm, &Next::Save(step, draft.path().into()))?;
    let identity = start.identity.get()?.clone();
    let loss_scale = r.setup.loss_scale.get();
    let state = State { version: 1, ft: env!("CARGO_PKG_VERSION").into(), step, identity, loss_scale };
    state::begin(draft.path(), &state, params)?;
    guard::weights(params, r.setup.comm, step)?;
    ranks::save(&r.setup, draft.path())?;
    let run = &start.job.recipe.run;
    let best = r.best.get().filter(|_| run.keep_best).map(|(step, _)| step);
    draft.commit(run.keep, best)?;
    r.saved = Some(step);
    Ok(())
}

fn check_reached(params: &Params, s: &Stepped) -> Result<(), Error> {
    let missing = unreached(&params.tensors, &s.reached);
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.iter().take(5).copied().collect::<Vec<_>>().join(", ");
    Err(Error::Unreached { count: missing.len(), names })
}
