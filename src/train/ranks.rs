//! Runs on several ranks: the first rank decides, all other ranks follow.
//!
//! The first rank runs like a single one, and announces every joint operation: a step, an evaluation, a
//! checkpoint. All ranks then call the same functions with matching collectives. Signals, schedules and
//! files are therefore handled in one place, and ranks cannot disagree.

use super::exhausted::{self, Planned};
use super::gather::Gather;
use super::step::{Setup, StepRows, Stop, accumulate, evaluate_until, update};
use super::{Error, Job, LossScale, guard, output, state};
use ft_base::memory::place;
use ft_base::terminal::tell;
use ft_data::{Batches, Dataset};
use ft_engine::base::Base;
use ft_engine::comm::{self, At, Comm, Mesh, Threads};
use ft_engine::model::Decoder;
use ft_engine::optim::{Optimizer, Schedule};
use ft_engine::params::Params;
use ft_engine::params::buffers::Shard;
use ft_engine::walk::{Around, Execution, Outline, Times, visit};
use ft_kernels::{cuda, gemm};
use ft_recipe::{Parallel, Recipe};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Next operation of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// A step, numbered from 0.
    Step(u64),
    Evaluate,
    /// This rank's shard of a checkpoint: number of completed steps, and folder.
    Save(u64, PathBuf),
    /// A forward pass of the first rank alone, with shards gathered from the other ranks.
    Forward,
    /// Loading of the result in a folder, for the check after writing.
    ReadBack(PathBuf),
    /// Loading of a checkpoint.
    Load(PathBuf),
    /// End of the run.
    End,
}

const NEXT: At = At { what: "what comes next", unit: None };
const LOADED: At = At { what: "the loading of the model", unit: None };
const SAVED: At = At { what: "the end of a checkpoint", unit: None };

impl Next {
    fn words(&self) -> Vec<u64> {
        fn bytes(path: &Path) -> impl Iterator<Item = u64> {
            path.as_os_str().as_bytes().iter().map(|b| u64::from(*b))
        }
        match self {
            Next::End => vec![0],
            Next::Step(n) => vec![1, *n],
            Next::Evaluate => vec![2],
            Next::Save(n, path) => [3, *n].into_iter().chain(bytes(path)).collect(),
            Next::Forward => vec![4],
            Next::ReadBack(path) => std::iter::once(5).chain(bytes(path)).collect(),
            Next::Load(path) => std::iter::once(6).chain(bytes(path)).collect(),
        }
    }

    fn of(words: &[u64]) -> Self {
        let path = |bytes: &[u64]| OsString::from_vec(bytes.iter().map(|b| *b as u8).collect()).into();
        match words {
            [1, n] => Next::Step(*n),
            [2] => Next::Evaluate,
            [3, n, bytes @ ..] => Next::Save(*n, path(bytes)),
            [4] => Next::Forward,
            [5, bytes @ ..] => Next::ReadBack(path(bytes)),
            [6, bytes @ ..] => Next::Load(path(bytes)),
            _ => Next::End,
        }
    }
}

/// Announces the next operation. Called by the first rank.
///
/// # Errors
/// Lost rank.
pub fn tell_next(comm: &dyn Comm, next: &Next) -> ft_base::Result<()> {
    comm.wait(NEXT, &next.words()).map(drop)
}

fn hear_next(comm: &dyn Comm) -> ft_base::Result<Next> {
    let all = comm.wait(NEXT, &[])?;
    Ok(all.first().map_or(Next::End, |words| Next::of(words)))
}

/// Writes this rank's shard of a checkpoint begun by the first rank. Returns after all ranks have written.
///
/// # Errors
/// Disk errors; lost rank.
pub fn save(s: &Setup<'_>, dir: &Path) -> ft_base::Result<()> {
    state::write(dir, s.params)?;
    s.comm.wait(SAVED, &[]).map(drop)
}

/// Loads this rank's shard of the model and of the checkpoint to resume. Returns after all ranks have
/// loaded.
///
/// # Errors
/// The model cannot be built; the checkpoint does not fit; lost rank.
pub fn load(
    job: &Job,
    base: &Base,
    checkpoint: Option<&Path>,
    comm: &dyn Comm,
) -> ft_base::Result<(Decoder, Params)> {
    if comm.world() > 1 {
        // Allocates the packing buffers of this rank now; later, their number would depend on thread
        // scheduling.
        gemm::make_slabs();
    }
    let (decoder, params) = job.load_shard(base, true, shard(&job.recipe.parallel, comm.rank()), comm)?;
    if let Some(dir) = checkpoint {
        state::load(dir, &params)?;
    }
    comm.wait(LOADED, &[])?;
    Ok((decoder, params))
}

/// Loads this rank's shard of a checkpoint. Returns after all ranks have loaded.
///
/// # Errors
/// The checkpoint does not fit; lost rank.
pub fn take_up(params: &Params, dir: &Path, comm: &dyn Comm) -> ft_base::Result<()> {
    state::load(dir, params)?;
    comm.wait(LOADED, &[]).map(drop)
}

/// Shard of a rank, by ZeRO stage.
pub fn shard(p: &Parallel, rank: usize) -> Shard {
    let mesh = Mesh::of(p);
    Shard { rank: mesh.data_rank(rank), ranks: mesh.data, stage: if mesh.data > 1 { p.zero } else { 0 } }
}

/// Explains a mismatch of `parallel.comm` and the device, with a hint; `None` if they match.
pub fn carries_nothing(r: &Recipe, cuda: bool) -> Option<(String, &'static str)> {
    let (word, is_for, hint) = match r.parallel.comm {
        ft_recipe::Comm::Nccl if !cuda => {
            ("nccl", "CUDA devices, and this run is on the CPU", "leave it out, or run.device=cuda")
        }
        ft_recipe::Comm::Mpi if cuda => (
            "mpi",
            "the CPU: tensors of CUDA devices go by NCCL",
            "leave it out, with mpirun too; or run.device=cpu",
        ),
        _ => return None,
    };
    Some((format!("parallel.comm = \"{word}\" is for {is_for}"), hint))
}

/// Refuses a `parallel.comm` without support for the device.
///
/// # Errors
/// NCCL on the CPU; MPI on CUDA.
pub fn check_comm(r: &Recipe, cuda: bool) -> Result<(), Error> {
    carries_nothing(r, cuda).map_or(Ok(()), |(what, hint)| {
        Err(Error::Usage(format!("{}: {what}\n  hint: {hint}", r.place("parallel.comm"))))
    })
}

/// Checks that this machine can run the ranks of the recipe.
///
/// # Errors
/// Fewer CUDA devices than ranks; NCCL missing; NCCL on the CPU; MPI on CUDA.
pub fn check(job: &Job) -> Result<(), Error> {
    let (p, cuda) = (&job.recipe.parallel, job.device.is_cuda());
    let fail = |key: &str, what: String, hint: &str| {
        Err(Error::Usage(format!("{}: {what}\n  hint: {hint}", job.recipe.place(key))))
    };
    check_comm(&job.recipe, cuda)?;
    let (ranks, here) = (p.ranks(), p.local());
    if !cuda || ranks == 1 {
        return Ok(());
    }
    let count = cuda::count() as u64;
    if here > count {
        let are = if count == 1 { "is 1 CUDA device" } else { &format!("are {count} CUDA devices") };
        let hint = format!("parallel.data={count}, or a launcher that starts processes on several machines");
        return fail("parallel.data", format!("{ranks} ranks have a device each, and there {are}"), &hint);
    }
    cuda::nccl_is_here().map_err(Error::Device)
}

/// Inputs of the loop on every rank.
#[derive(Clone)]
pub struct Shared {
    pub job: Arc<Job>,
    /// The base to load weights from.
    pub base: Base,
    pub data: Arc<Dataset>,
    pub eval: Option<Arc<Dataset>>,
    pub execution: Execution,
    /// Checkpoint to resume.
    pub checkpoint: Option<PathBuf>,
    /// Initial loss scale, for f16.
    pub loss_scale: Option<LossScale>,
    /// Plan, for out-of-memory reports.
    pub planned: Arc<Planned>,
}

/// Threads of the ranks other than the first.
pub struct Followers {
    threads: Vec<(usize, JoinHandle<()>)>,
    patience: Duration,
}

/// Creates the ranks of a run: the first, and the others.
pub fn group(p: &Parallel) -> (Threads, Vec<Threads>) {
    let mut all = comm::group(Mesh::of(p).ranks().max(1), Duration::from_secs(p.timeout));
    let others = all.split_off(1);
    (all.swap_remove(0), others)
}

impl Followers {
    /// Starts one thread per rank.
    ///
    /// # Errors
    /// The system refuses more threads.
    pub fn start(ranks: Vec<Threads>, shared: &Arc<Shared>) -> ft_base::Result<Self> {
        let patience = Duration::from_secs(shared.job.recipe.parallel.timeout);
        let mut all = Self { threads: Vec::new(), patience };
        for comm in ranks {
            let (rank, shared) = (comm.rank(), Arc::clone(shared));
            let thread = std::thread::Builder::new().name(format!("rank {rank}"));
            let started = thread.spawn(move || {
                place::follow();
                let threads = exhausted::start_threads_of(rank, &shared.job.recipe.parallel);
                let followed =
                    threads.map_err(Into::into).and_then(|_threads| follow_on(&shared, rank, &comm));
                if let Err(e) = followed {
                    let e = shared.planned.explain(e);
                    comm.fail(&e);
                    end_with_hung(&e);
                }
            });
            let started = started.map_err(|e| Error::Usage(format!("rank {rank} cannot start: {e}")))?;
            all.threads.push((rank, started));
        }
        Ok(all)
    }

    /// Waits for the threads to end, except for a rank that hangs.
    pub fn end(self, outcome: &ft_base::Result<super::Outcome>) {
        let hangs = outcome.as_ref().err().and_then(|e| e.of::<comm::Error>()).filter(|e| e.hangs);
        let end = Instant::now() + self.patience;
        for (rank, thread) in self.threads {
            let waits = || hangs.is_none_or(|h| h.rank != rank) && Instant::now() < end;
            while !thread.is_finished() && waits() {
                std::thread::sleep(Duration::from_millis(2));
            }
            if thread.is_finished() {
                // The panic was printed, and the first rank reports the lost rank.
                let _ = thread.join();
            }
        }
    }
}

/// Runs a rank on a thread, on a device of its own.
fn follow_on(shared: &Shared, rank: usize, comm: &dyn Comm) -> ft_base::Result<()> {
    let job = match shared.job.device.is_cuda() {
        true => Arc::new(shared.job.on(cuda::open(rank).map_err(Error::Device)?)),
        false => Arc::clone(&shared.job),
    };
    on_device(&job, comm, |comm| follow(&Shared { job: Arc::clone(&job), ..shared.clone() }, comm, &|| 0))
}

/// Runs `f` with collectives for the tensors of the device of a job.
///
/// # Errors
/// As [`comm::on_device`].
pub fn on_device<R>(
    job: &Job,
    comm: &dyn Comm,
    f: impl FnOnce(&dyn Comm) -> ft_base::Result<R>,
) -> ft_base::Result<R> {
    comm::on_device(comm, &job.device, Duration::from_secs(job.recipe.parallel.timeout), f)
}

/// If the first rank hangs, another rank must end the process.
fn end_with_hung(e: &ft_base::Error) {
    if let Some(lost) = e.of::<comm::Error>().filter(|l| l.hangs && l.rank == 0) {
        tell(&format!("error: {lost}"));
        std::process::exit(lost.code as i32);
    }
}

/// Loop of all ranks except the first. `stop` returns signals sent to this process.
///
/// # Errors
/// Errors of this rank; lost rank.
pub fn follow(shared: &Shared, comm: &dyn Comm, stop: Stop<'_>) -> ft_base::Result<()> {
    let Shared { job, data, .. } = shared;
    let r = &job.recipe;
    let (decoder, params) = load(job, &shared.base, shared.checkpoint.as_deref(), comm)?;
    let (optimizer, batches) = (Optimizer::new(&params, &r.optimizer), super::rows::batches(r, data)?);
    let schedule = Schedule::new(&r.optimizer, batches.steps());
    let parts = (&decoder, &params, &optimizer);
    let setup = Setup::new(job, parts, shared.execution, shared.loss_scale, comm);
    let gather = Gather::new(&decoder, &params, comm);
    loop {
        let done = match hear_next(comm)? {
            Next::End => return Ok(()),
            Next::Step(n) => {
                #[cfg(test)]
                broken::look(&r.run.output, comm.rank(), n)?;
                step(&setup, (data, &batches, &schedule), n, stop)
            }
            Next::Evaluate => match &shared.eval {
                Some(eval) => {
                    place::enter(place::Phase::Evaluate, 0);
                    let around = (comm, &gather as &dyn Around);
                    evaluate_until(&decoder, around, eval, &setup.execution, &job.device, stop).map(drop)
                }
                None => Ok(()),
            },
            Next::Save(step, dir) => {
                place::enter(place::Phase::Save, 0);
                guard::weights(&params, comm, step).and_then(|()| save(&setup, &dir))
            }
            Next::Forward => visit::pass(Outline::of(&decoder).forward(), &gather, &mut |_| Ok(())),
            Next::ReadBack(dir) => output::read_back(job, &params, &dir),
            Next::Load(dir) => take_up(&params, &dir, comm),
        };
        match done {
            // The first rank handles the signal.
            Err(e) if matches!(e.of(), Some(Error::Abandoned(_))) => {}
            done => done?,
        }
    }
}

fn step(
    s: &Setup<'_>,
    (data, batches, schedule): (&Dataset, &Batches, &Schedule),
    n: u64,
    stop: Stop<'_>,
) -> ft_base::Result<()> {
    let rows = batches.rows(n as usize);
    let at = StepRows { data, rows: &rows, step: n };
    let times = &mut Times::off();
    let lr = |peak: f64| schedule.at(n as usize, peak);
    let summed = accumulate(s, at, &lr, times, stop)?;
    update(s, summed, &lr, times).map(drop)
}

/// Fault injection for tests.
#[cfg(test)]
pub mod broken {
    use std::path::{Path, PathBuf};
    use std::sync::Mutex;

    /// A fault, as a function.
    pub type Breaks = fn() -> ft_base::Result<()>;

    /// Faults by run folder, rank and step.
    pub static BREAKS: Mutex<Vec<(PathBuf, usize, u64, Breaks)>> = Mutex::new(Vec::new());

    /// Triggers the fault for a step, if any.
    pub fn look(run: &Path, rank: usize, step: u64) -> ft_base::Result<()> {
        let breaks = BREAKS.lock().map(|all| {
            let found = all.iter().find(|(p, r, s, _)| p == run && (*r, *s) == (rank, step));
            found.map(|f| f.3)
        });
        breaks.ok().flatten().map_or(Ok(()), |f| f())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn what_is_told_is_heard() {
        let odd = OsStr::from_bytes(b"runs/\xff\x00x");
        for next in [
            Next::End,
            Next::Step(0),
            Next::Step(u64::MAX),
            Next::Evaluate,
            Next::Forward,
            Next::Save(7, odd.into()),
            Next::ReadBack(odd.into()),
            Next::Load(odd.into()),
        ] {
            assert_eq!(Next::of(&next.words()), next);
        }
    }
}
