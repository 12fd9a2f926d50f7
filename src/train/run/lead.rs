//! The first rank of a run: checks, starts the other ranks, and trains.

use super::folder::{folder_there, refuse_earlier};
use super::options::{Options, Outcome};
use super::prepare::{Prepared, PreparedRun, prepare};
use super::result_cache::InputRecord;
use super::signals::Signals;
use super::trainer::Trainer;
use crate::train::memory::{MemoryMonitor, start_threads_of};
use crate::train::ranks::{self, RankThreads, RemoteRanks};
use ft_base::store::RunLock;
use ft_engine::load::Base;
use ft_engine::ranks::Comm;
use ft_recipe::{Recipe, Reference};

/// As [`super::run`], on the first rank; `remote` are the ranks in other processes.
pub fn run_first(
    recipe: Recipe,
    options: &Options,
    remote: Option<&RemoteRanks<'_>>,
) -> ft_base::Result<Outcome> {
    let signals = Signals::catch()?.reported();
    let dir = recipe.run.output.clone();
    folder_there(&recipe)?;
    // Held until the end: the state of the run folder cannot change in between.
    let _lock = RunLock::take(&dir)?;
    refuse_earlier(&recipe, options)?;
    // A run with an observer may end before its last step.
    let unobserved = Some(&recipe).filter(|_| options.observer.is_none());
    let record = unobserved.and_then(InputRecord::collect).map(|r| (r, recipe.clone()));
    if options.resume
        && options.step.is_none()
        // Names of keys are checked against the checkpoint's.
        && options.accept_change.is_empty()
        && let Some(result) = record.as_ref().and_then(|(r, _)| r.finished(&dir))
    {
        return Ok(Outcome::Already { result });
    }
    let outcome = match prepare(recipe, options, remote, signals)? {
        Prepared::Finished(result) => Outcome::Already { result },
        Prepared::Ready(run, monitor) => {
            train(&run, *monitor, remote).map_err(|e| run.inputs.planned.explain(e))?
        }
    };
    if let (Some((record, recipe)), Outcome::Done { result } | Outcome::Already { result }) =
        (&record, &outcome)
    {
        record.store(recipe, &dir, result);
    }
    Ok(outcome)
}

/// Starts the ranks, and trains.
fn train(
    run: &PreparedRun,
    monitor: MemoryMonitor,
    remote: Option<&RemoteRanks<'_>>,
) -> ft_base::Result<Outcome> {
    if let Some(remote) = remote {
        return lead(run, monitor, remote.comm, &mut |_| remote.begin(&run.inputs));
    }
    let parallel = &run.inputs.job.recipe.parallel;
    let (comm, mut others) = ranks::group(parallel);
    let mut threads = None;
    let mut follow = |base: &Base| {
        threads = Some(RankThreads::start(std::mem::take(&mut others), &run.inputs, base)?);
        Ok(())
    };
    let outcome = if comm.world() == 1 {
        lead(run, monitor, &comm, &mut follow)
    } else {
        // All ranks run on threads with separate thread pools.
        std::thread::scope(|s| {
            let first = s.spawn(|| {
                let _threads = start_threads_of(0, parallel)?;
                lead(run, monitor, &comm, &mut follow)
            });
            first.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    };
    // Other ranks stop waiting for this one.
    drop(comm);
    threads.into_iter().for_each(|t| t.end(&outcome));
    outcome
}

/// Starts the other ranks with `follow`, loads the model, runs the steps, writes the result.
fn lead(
    run: &PreparedRun,
    mut monitor: MemoryMonitor,
    comm: &dyn Comm,
    follow: &mut dyn FnMut(&Base) -> ft_base::Result<()>,
) -> ft_base::Result<Outcome> {
    let job = &run.inputs.job;
    let other = matches!(job.recipe.preference.reference, Reference::Other(_));
    // the log-probabilities of another model are kept by the identity of the run
    let identity = if other { Some(run.identity.get()?) } else { None };
    let base = job.base_to_load()?;
    run.identity.loading(&base)?;
    follow(&base)?;
    ranks::on_device(job, comm, |comm| {
        let reference = run.inputs.reference(identity, comm).of_other()?;
        let loaded = ranks::load(job, &base, comm)?;
        run.identity.loaded(&base)?;
        drop(base);
        monitor.loaded(&loaded.1);
        let known = (reference, Some(run.identity.get()?));
        let model = ranks::ready(&run.inputs, loaded, known, comm)?;
        Trainer::new(run, run.inputs.context(&model, comm), monitor)?.run()
    })
}
