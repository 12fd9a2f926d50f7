//! Runs with one process per rank: `mpirun -n 4 ft run r.toml parallel.data=4`, or with `torchrun` or
//! `srun`.
//!
//! The first rank runs like a single process. The others print nothing: they wait until the first has
//! checked the recipe, load recipe, data and their shard of the model, then follow the first like ranks in
//! threads. Messages of rank N go to `rank-N.log` in the run folder.

use super::lead::run_first;
use super::options::{Options, Outcome};
use super::signals::Signals;
use crate::train::job::Job;
use crate::train::memory::{MemoryMonitor, limits, start_threads_beside};
use crate::train::ranks::{self, RemoteRanks, RunInputs};
use crate::train::step::LossScale;
use crate::train::{Error, auto_layout};
use ft_base::memory;
use ft_base::store::{self, RunLock};
use ft_base::terminal;
use ft_base::terminal::tell;
use ft_data::Dataset;
use ft_engine::load::layout;
use ft_engine::ranks::processes;
use ft_engine::ranks::{CollectiveId, Comm};
use ft_engine::walk::Execution;
use ft_hub::Want;
use ft_plan::{Workload, report};
use ft_recipe::{Launch, Recipe, Weights};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

const OPENED: CollectiveId = CollectiveId::all("the check of the recipe");
const GIVEN: CollectiveId = CollectiveId::all("what ranks were given");
const BEGUN: CollectiveId = CollectiveId::all("the begin of the run");
/// Time limit for the run folder to appear, because network file systems may lag.
const FOLDER_LIMIT: Duration = Duration::from_secs(10);

/// Decisions of the first rank.
#[derive(Serialize, Deserialize)]
struct StartMessage {
    /// Version of `ft` on the first rank.
    version: String,
    execution: Execution,
    checkpoint: Option<PathBuf>,
    loss_scale: Option<LossScale>,
}

impl StartMessage {
    /// Parses the message of the first rank.
    ///
    /// # Errors
    /// Another version of `ft` on the first rank, or an unreadable message.
    fn parse(json: serde_json::Value, rank: usize) -> Result<Self, Error> {
        let (theirs, own) = (json["version"].as_str(), env!("CARGO_PKG_VERSION"));
        if let Some(theirs) = theirs.filter(|v| *v != own) {
            return Err(Error::Usage(format!(
                "rank {rank} is ft {own}, and rank 0 is ft {theirs}\n  hint: the same ft on every machine"
            )));
        }
        serde_json::from_value(json).map_err(|e| {
            Error::Usage(format!(
                "rank {rank} cannot read how rank 0 starts the run: {e}\n  hint: the same ft on every machine"
            ))
        })
    }
}

/// Settings and hashes that must agree on all ranks, as pairs of name and value.
#[derive(Serialize, Deserialize)]
struct Settings(Vec<(String, String)>);

/// Trains as one process of several.
///
/// # Errors
/// As [`super::run()`]; lost rank; number of processes different from the number of ranks in the recipe.
pub fn run(mut recipe: Recipe, options: &Options, launch: Option<&Launch>) -> ft_base::Result<Outcome> {
    let timeout = Duration::from_secs(recipe.parallel.timeout);
    // A process that fails to join must print its own error.
    let joined = processes::join(launch, timeout).inspect_err(|_| terminal::to_terminal());
    let (comm, neighbors) = joined?;
    if comm.rank() > 0 {
        terminal::hush();
    }
    memory::share_among(neighbors.here as u64);
    let outcome = std::thread::scope(|s| {
        // Every rank runs on a new thread, with a thread pool of the rank.
        let rank = s.spawn(|| {
            let _threads = start_threads_beside(neighbors.on_processors)?;
            auto_layout::agree(&mut recipe, &comm)?;
            check_count(&recipe, comm.world())?;
            comm.know_stages(recipe.parallel.pipeline);
            if comm.rank() == 0 { lead(recipe, options, &comm) } else { follow(recipe, &comm) }
        });
        rank.join()
    });
    let outcome = match outcome {
        Ok(outcome) => outcome,
        Err(panic) => {
            drop(comm);
            std::panic::resume_unwind(panic)
        }
    };
    match &outcome {
        Ok(_) => comm.leave(),
        Err(e) => {
            comm.fail(e);
            if comm.must_report() {
                terminal::to_terminal();
            }
            drop(comm);
        }
    }
    outcome
}

/// Refuses a world of the wrong size. All ranks fail together.
fn check_count(recipe: &Recipe, world: usize) -> Result<(), Error> {
    let ranks = recipe.parallel.ranks();
    if ranks == world as u64 {
        return Ok(());
    }
    let (place, are) =
        (recipe.place("parallel.data"), if world == 1 { "process was" } else { "processes were" });
    Err(Error::Usage(format!(
        "{place}: the recipe has {ranks} ranks, and {world} {are} started\n  hint: as many processes \
            as ranks (mpirun -n {ranks}), or parallel.data={world}"
    )))
}

/// The first process.
struct FirstProcess<'a> {
    comm: &'a dyn Comm,
    /// Messages sent so far.
    opened: Cell<bool>,
    begun: Cell<bool>,
}

fn lead(recipe: Recipe, options: &Options, comm: &dyn Comm) -> ft_base::Result<Outcome> {
    let others = FirstProcess { comm, opened: Cell::new(false), begun: Cell::new(false) };
    let outcome = run_first(recipe, options, Some(&others))?;
    // A run that was already finished sends neither message before it returns.
    if !others.opened.get() {
        comm.barrier(OPENED)?;
    } else if !others.begun.get() {
        comm.barrier(BEGUN)?;
    }
    Ok(outcome)
}

impl RemoteRanks for FirstProcess<'_> {
    fn comm(&self) -> &dyn Comm {
        self.comm
    }

    fn opened(&self) -> ft_base::Result<()> {
        self.opened.set(true);
        self.comm.broadcast_object(OPENED, &true)
    }

    fn begin(&self, inputs: &RunInputs) -> ft_base::Result<()> {
        self.begun.set(true);
        let message = StartMessage {
            version: env!("CARGO_PKG_VERSION").into(),
            execution: inputs.execution,
            checkpoint: inputs.checkpoint.clone(),
            loss_scale: inputs.loss_scale,
        };
        self.comm.broadcast_object(BEGUN, &message)?;
        agree(self.comm, &settings(&inputs.job, &inputs.data, inputs.eval.as_deref())?)
    }
}

/// Collects the settings and hashes of this process.
fn settings(job: &Job, data: &Dataset, eval: Option<&Dataset>) -> ft_base::Result<Settings> {
    let mut all = vec![
        ("version of ft".to_string(), env!("CARGO_PKG_VERSION").to_string()),
        ("config of the model".into(), serde_json::to_string(&job.config.raw).unwrap_or_default()),
        ("training data".into(), data.hash.clone()),
        ("evaluation data".into(), eval.map_or(String::new(), |e| e.hash.clone())),
    ];
    all.extend(job.recipe.math_keys().into_iter().map(|(key, value)| (format!("recipe: {key}"), value)));
    let own = |key: &str, value: &dyn std::fmt::Debug| (format!("recipe: {key}"), format!("{value:?}"));
    let r = &job.recipe;
    all.push(own("parallel", &r.parallel));
    all.push(own("memory.offload", &r.memory.offload));
    all.push(own("run.output", &r.run.output));
    if r.model.weights == Weights::Load {
        let files = layout::open(&job.config, &job.model.dir)?;
        all.push(("model, by its size,".into(), files.total_bytes().to_string()));
    }
    Ok(Settings(all))
}

/// Compares the settings of all ranks, and refuses the first difference. All ranks fail together.
fn agree(comm: &dyn Comm, mine: &Settings) -> ft_base::Result<()> {
    // Without a timeout: a rank may still read from disk.
    comm.barrier(GIVEN)?;
    let all = comm.all_gather_object(GIVEN, mine)?;
    let Some((first, others)) = all.split_first() else { return Ok(()) };
    for (rank, other) in (1..).zip(others) {
        let differs = first
            .0
            .iter()
            .find(|item| !other.0.contains(item))
            .or_else(|| other.0.iter().find(|item| !first.0.contains(item)));
        if let Some((what, _)) = differs {
            return Err(Error::Usage(format!(
                "rank {rank} of {} has another {what} than rank 0\n  hint: the same command, files \
                    and ft on every machine",
                comm.world()
            ))
            .into());
        }
    }
    Ok(())
}

/// Runs a process other than the first.
fn follow(mut recipe: Recipe, comm: &dyn Comm) -> ft_base::Result<Outcome> {
    // Signals are passed to the first rank, and the run saves a checkpoint.
    let signals = Signals::catch()?;
    signals.hold();
    if comm.receive_object::<bool>(OPENED)?.is_none() {
        return Ok(Outcome::Followed);
    }
    let prepared = prepare(&mut recipe, comm.rank());
    let Some(start) = comm.receive_object(BEGUN)? else { return Ok(Outcome::Followed) };
    let start = StartMessage::parse(start, comm.rank())?;
    let (mut job, data, eval) = prepared?;
    job.recipe.run.micro_rows = start.execution.micro_rows.into();
    agree(comm, &settings(&job, &data, eval.as_ref())?)?;
    let mut plan = job.plan(|recipe| Workload::of_data(recipe, &data, eval.as_ref()))?;
    limits::check(&job, &plan)?;
    plan.execution = start.execution;
    let mut monitor = MemoryMonitor::begin(&plan, &job);
    let base = job.base_to_load()?;
    let (batches, schedule) = RunInputs::steps(&job, &data)?;
    let inputs = RunInputs {
        data: Arc::new(data),
        eval: eval.map(Arc::new),
        batches,
        schedule,
        execution: start.execution,
        checkpoint: start.checkpoint,
        loss_scale: start.loss_scale,
        planned: monitor.planned(),
        job: Arc::new(job),
    };
    let outcome =
        ranks::on_device(&inputs.job, comm, |comm| ranks::follow(&inputs, &base, comm, &|| signals.asked()));
    outcome.map_err(|e| inputs.planned.explain(e))?;
    monitor.measure();
    tell(&format!("rank {} has ended; at its peak it took {}", comm.rank(), report::bytes(monitor.peak())));
    Ok(Outcome::Followed)
}

/// Loads the job and data once the first rank has locked the run folder.
fn prepare(recipe: &mut Recipe, rank: usize) -> ft_base::Result<(Job, Dataset, Option<Dataset>)> {
    let dir = recipe.run.output.clone();
    let end = Instant::now() + FOLDER_LIMIT;
    while !RunLock::is_taken(&dir) {
        if Instant::now() > end {
            let place = recipe.place("run.output");
            return Err(Error::Usage(format!(
                "{place}: {} is another folder here than on the first rank's machine\n  hint: a \
                    folder that all machines share",
                dir.display()
            ))
            .into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    terminal::to_file(store::create(&dir.join(format!("rank-{rank}.log")))?);
    let job = Job::open(recipe.clone(), Want::Weights, false)?;
    ranks::check(&job)?;
    let (data, eval) = job.data()?;
    Ok((job, data, eval))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_or_an_unreadable_start_is_an_error() {
        for (text, said) in [
            ("[]", "rank 1 cannot read how rank 0 starts the run"),
            ("{\"execution\": 1}", "rank 1 cannot read how rank 0 starts the run"),
            ("{\"version\": \"0.0.0\"}", "and rank 0 is ft 0.0.0"),
        ] {
            let json = serde_json::from_str(text).unwrap();
            let e = StartMessage::parse(json, 1).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(e.contains(said), "{text}: {e}");
        }
    }
}
