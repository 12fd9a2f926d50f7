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
use crate::train::ranks::{self, BEGUN, OPENED, RemoteRanks, RunInputs, StartMessage};
use crate::train::{Error, auto_layout};
use ft_base::memory;
use ft_base::store::{self, RunLock};
use ft_base::terminal::{self, plural, tell};
use ft_data::Dataset;
use ft_engine::ranks::{Comm, processes};
use ft_hub::Want;
use ft_plan::{Workload, report};
use ft_recipe::{Launch, Recipe};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit for the run folder to appear, because network file systems may lag.
const FOLDER_LIMIT: Duration = Duration::from_secs(10);

/// Trains as one process of several.
///
/// # Errors
/// As [`super::run()`]; lost rank; number of processes different from the number of ranks in the recipe.
pub fn run(mut recipe: Recipe, options: &Options, launch: Option<&Launch>) -> ft_base::Result<Outcome> {
    let timeout = Duration::from_secs(recipe.parallel.timeout);
    // No other rank prints the error of a process outside the group.
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
            auto_layout::agree(&mut recipe, options.resume, &comm)?;
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
    let were = if world == 1 { "process was" } else { "processes were" };
    let right = match ranks {
        1 => "no launcher".to_string(),
        _ => format!("as many processes as ranks (mpirun -n {ranks})"),
    };
    let why = format!(
        "the recipe has {}, and {world} {were} started\n  hint: {right}, or {}",
        plural(ranks as usize, "rank"),
        recipe.parallel.of_ranks(world)
    );
    Err(Error::at(recipe, "parallel", why))
}

/// Runs the first process.
fn lead(recipe: Recipe, options: &Options, comm: &dyn Comm) -> ft_base::Result<Outcome> {
    let others = RemoteRanks::new(comm);
    let outcome = run_first(recipe, options, Some(&others))?;
    others.end()?;
    Ok(outcome)
}

/// Runs a process other than the first.
fn follow(recipe: Recipe, comm: &dyn Comm) -> ft_base::Result<Outcome> {
    // Signals are passed to the first rank, and the run saves a checkpoint.
    let signals = Signals::catch()?;
    signals.hold();
    if comm.receive_object::<bool>(OPENED)?.is_none() {
        return Ok(Outcome::Followed);
    }
    let prepared = prepare(recipe, comm.rank());
    let Some(start) = comm.receive_object(BEGUN)? else { return Ok(Outcome::Followed) };
    let start = StartMessage::parse(start, comm.rank())?;
    let (mut job, data, eval) = prepared?;
    job.recipe.run.micro_rows = start.execution.micro_rows.into();
    ranks::agree(comm, &job, &data, eval.as_ref())?;
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
fn prepare(recipe: Recipe, rank: usize) -> ft_base::Result<(Job, Dataset, Option<Dataset>)> {
    let dir = recipe.run.output.clone();
    let end = Instant::now() + FOLDER_LIMIT;
    while !RunLock::is_taken(&dir) {
        if Instant::now() > end {
            let why = format!(
                "{} is another folder here than on the first rank's machine\n  hint: a folder that all \
                    machines share",
                dir.display()
            );
            return Err(Error::at(&recipe, "run.output", why).into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    terminal::to_file(store::create(&dir.join(format!("rank-{rank}.log")))?);
    let job = Job::open(recipe, Want::Weights, false)?;
    ranks::check(&job.recipe, job.device.is_cuda(), None)?;
    let (data, eval) = job.data()?;
    Ok((job, data, eval))
}
