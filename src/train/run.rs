//! `ft run`: the loop over steps, with evaluation, checkpoints, signals and the result at the end.

use super::identity::identity;
use super::running::{Running, now};
use super::signals::Signals;
use super::state::{self, State};
use super::step::Setup;
use super::watch::{self, Watch};
use super::{Error, Job, Stepped, job, output};
use crate::adapt::{Params, build::unreached};
use crate::data::{Batches, Dataset, Micro};
use crate::hub::Want;
use crate::log::{Metrics, Progress, bytes_bar, memory, place, tell, warn};
use crate::optim::{Optimizer, Schedule};
use crate::plan::{Plan, Workload};
use crate::recipe::Recipe;
use crate::store::checkpoint::{Checkpoint, Checkpoints};
use crate::store::{self, RunLock};
use crate::walk::{Load, RouterLosses};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Steps of a process in which memory that runs out means that the plan was wrong, and another one may be right.
const YOUNG: usize = 3;

/// How a run begins.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Go on from the newest whole checkpoint.
    pub resume: bool,
    /// Remove what an earlier run left.
    pub overwrite: bool,
    /// Keys that may differ from the checkpoint's.
    pub accept_change: Vec<String>,
}

/// How a run ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// It trained and wrote its result.
    Done {
        /// Folder of the adapter or model.
        result: PathBuf,
    },
    /// It was finished before.
    Already {
        /// Folder of the adapter or model.
        result: PathBuf,
    },
}

/// Trains as the recipe says.
///
/// # Errors
/// Anything that the recipe, model or data has wrong, before the first step; later a disk that is full, a loss
/// that is not finite, a signal. Checkpoints that were written stay whole.
pub fn run(recipe: Recipe, options: &Options) -> crate::Result<Outcome> {
    let signals = Signals::catch()?;
    let dir = recipe.run.output.clone();
    if has_checkpoints(&dir) && !options.resume && !options.overwrite {
        return Err(Error::Exists { dir: dir.display().to_string() }.into());
    }
    watch::before_download(&recipe)?;
    let mut job = Job::open(recipe, Want::Weights, true)?;
    let data = job.train_data()?;
    let eval = job.eval_data()?;
    let batches = job::batches(&job.recipe, &data)?;
    let total = batches.steps();
    job.check()?;
    let planned = |job: &Job| job.plan(|recipe| Workload::of_data(recipe, &data, eval.as_ref()));
    // a finished run needs no room to say that it is finished
    let goes_on = options.resume && has_checkpoints(&dir);
    let fresh = if goes_on { None } else { Some(planned(&job)) };
    if let Some(plan) = &fresh {
        watch::check(&job, plan)?;
    }
    job.keep_lengths(&data, eval.as_ref());
    std::fs::create_dir_all(&dir).map_err(|e| store::Error::write("make the folder", &dir, None, e))?;
    let _lock = RunLock::take(&dir)?;
    if options.overwrite {
        clear(&dir)?;
    }
    let checkpoints = Checkpoints::open(&dir.join("checkpoints"))?;
    let newest = if options.resume { checkpoints.newest_whole()? } else { None };
    for w in newest.iter().flat_map(|c| &c.warnings) {
        warn(w);
    }
    let reached = newest.as_ref().map(|c| state::read(&c.path)).transpose()?;
    if options.resume {
        keep_micro_rows(&mut job.recipe, reached.as_ref(), &dir);
    }
    let plan = match fresh {
        Some(plan) if !options.resume => plan,
        _ => planned(&job),
    };
    // from here on it is as if the recipe had said so: for the run's life, and in what it writes
    job.recipe.run.set_micro_rows(plan.choices.micro_rows);
    let job = job;
    let identity = identity(&job, &data)?;
    let mut done = 0;
    if let (Some(c), Some(s)) = (&newest, &reached) {
        let changes = state::changes(&s.identity, &identity, &options.accept_change);
        if !changes.is_empty() {
            return Err(Error::Changed { dir: dir.display().to_string(), changes: changes.join("\n") }.into());
        }
        done = s.step;
        let result = result_dir(&job, &dir);
        if done >= total as u64 && ended(&dir) && result.is_dir() {
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
        identity: &identity,
        checkpoints: &checkpoints,
        signals: &signals,
    };
    train(&start, watch).map_err(|e| planned.explain(e))
}

/// What a run has when nothing more can be wrong with what it was given.
struct Start<'a> {
    job: &'a Job,
    plan: &'a Plan,
    data: &'a Dataset,
    eval: Option<&'a Dataset>,
    batches: &'a Batches,
    dir: &'a Path,
    /// The checkpoint to go on from, and its step.
    newest: Option<&'a Checkpoint>,
    done: u64,
    identity: &'a BTreeMap<String, String>,
    checkpoints: &'a Checkpoints,
    signals: &'a Signals,
}

/// Loads the model, goes through the steps, writes the result.
fn train(start: &Start<'_>, mut watch: Watch) -> crate::Result<Outcome> {
    let Start { job, plan, data, eval, batches, dir, newest, done, identity, checkpoints, signals } = *start;
    let total = batches.steps();
    let bar = bytes_bar("loading", job.weights()?.map_or(0, |f| f.total_bytes()));
    let (decoder, params) = job.build(true, &|n| bar.inc(n))?;
    bar.finish_and_clear();
    watch.loaded(&params);
    if let Some(c) = newest {
        state::load(&c.path, &params)?;
    }
    store::write_atomic(&dir.join("recipe.toml"), job.recipe.to_toml().as_bytes())?;
    let metrics = Metrics::open(&dir.join("metrics.jsonl"), newest.map(|_| done))?;
    let optimizer = Optimizer::new(&params, &job.recipe.optimizer);
    let schedule = Schedule::new(&job.recipe.optimizer, job.learning_rate(), total);
    let mut r = Running {
        setup: Setup {
            decoder: &decoder,
            params: &params,
            optimizer: &optimizer,
            device: &job.device,
            seed: job.recipe.run.seed,
            choices: plan.choices,
            clip: job.recipe.run.clip,
            router: RouterLosses { aux: job.recipe.router.aux_loss, z: job.recipe.router.z_loss },
        },
        job,
        eval,
        metrics,
        progress: Progress::new(done, total as u64),
        watch,
        load: (0, Load::default()),
    };
    r.start(data, total, done, identity)?;

    for step in done as usize..total {
        let started = Instant::now();
        let lr = schedule.at(step);
        let young = step - (done as usize) < YOUNG;
        let s = r
            .step(data, &batches.rows(step), step as u64, lr, young)
            .map_err(|e| r.stopped(step as u64, r.watch.planned().explain(e)))?;
        if step == done as usize {
            check_reached(&params, &s)?;
        }
        let count = step as u64 + 1;
        r.stepped(count, lr, &s, started.elapsed().as_secs_f64())?;
        let last = step + 1 == total;
        r.loaded(count, &s.load, last)?;
        let due = |every: usize| last || (every > 0 && (step + 1) % every == 0);
        if due(job.recipe.run.eval_every) {
            r.evaluate(count)?;
        }
        let signal = signals.seen();
        if due(job.recipe.run.save_every) || signal.is_some() {
            save(checkpoints, count, identity, &params, job.recipe.run.keep)
                .map_err(|e| r.stopped(count, r.watch.planned().explain(e)))?;
        }
        if let (Some((name, code)), false) = (signal, last) {
            r.progress.finish();
            return Err(r.stopped(count, Error::Signal { name, step: count, code }.into()));
        }
    }
    r.sample(total as u64)?;
    r.progress.finish();
    place::enter(place::Phase::Save, 0);
    let probe = output::sample(&Micro::collate(data, &[0]));
    let result = output::write(job, &decoder, &params, dir, &probe)?;
    r.watch.look();
    if let Some(warning) = r.watch.verdict() {
        r.progress.line(&warning);
    }
    r.metrics.write(&json!({
        "event": "end", "step": total, "result": result, "peak_host_bytes": memory::peak_host_bytes(),
        "peak_device_bytes": r.watch.peak(), "planned_peak_bytes": r.watch.plan().engine(),
        "memory": r.watch.compared(), "time": now(),
    }))?;
    Ok(Outcome::Done { result })
}

/// With `micro_rows = "auto"`, takes what the run chose when it began, from its checkpoint or, before there is one,
/// from its resolved recipe: another choice would sum in another order, and the result would have other bits.
fn keep_micro_rows(recipe: &mut Recipe, reached: Option<&State>, dir: &Path) {
    if !recipe.run.micro_auto {
        return;
    }
    const KEY: &str = "run.micro_rows";
    let written = match reached {
        Some(state) => state.identity.get(KEY).cloned(),
        None => Recipe::load(&dir.join("recipe.toml"), &[]).ok().and_then(|r| {
            let (mut then, mut now) = (r.math_keys(), recipe.math_keys());
            let rows = then.remove(KEY);
            now.remove(KEY);
            rows.filter(|_| then == now)
        }),
    };
    let rows = written.and_then(|n| n.parse::<usize>().ok());
    if let Some(n) = rows.filter(|n| *n > 0 && recipe.run.batch_rows.is_multiple_of(*n)) {
        recipe.run.set_micro_rows(n);
    }
}

/// Whether a run folder holds checkpoints, looked up without touching it.
fn has_checkpoints(dir: &Path) -> bool {
    std::fs::read_dir(dir.join("checkpoints"))
        .is_ok_and(|d| d.flatten().any(|e| e.file_name().to_string_lossy().starts_with("step-")))
}

fn result_dir(job: &Job, dir: &Path) -> PathBuf {
    dir.join(if job.selection.everything_full() { "model" } else { "adapter" })
}

/// Whether the metrics of a run folder have its end.
fn ended(dir: &Path) -> bool {
    crate::log::read_metrics(&dir.join("metrics.jsonl"))
        .is_ok_and(|m| m.iter().any(|e| e["event"] == json!("end")))
}

/// Removes what an earlier run left in its folder; other files stay.
fn clear(dir: &Path) -> Result<(), store::Error> {
    for name in ["checkpoints", "adapter", "model"] {
        let p = dir.join(name);
        if p.exists() {
            std::fs::remove_dir_all(&p).map_err(|e| store::Error::write("remove", &p, None, e))?;
        }
    }
    Ok(())
}

fn save(
    checkpoints: &Checkpoints,
    step: u64,
    identity: &BTreeMap<String, String>,
    params: &Params,
    keep: usize,
) -> crate::Result<()> {
    place::enter(place::Phase::Save, 0);
    let draft = checkpoints.begin(step)?;
    let state = State { version: 1, ft: env!("CARGO_PKG_VERSION").into(), step, identity: identity.clone() };
    state::save(draft.path(), &state, params)?;
    draft.commit(keep)?;
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
