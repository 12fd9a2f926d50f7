//! Ranks as threads of one process.

use super::follow::{follow, on_device};
use super::inputs::RunInputs;
use crate::train::Error;
use crate::train::memory::start_threads_of;
use ft_base::memory::place;
use ft_base::terminal::tell;
use ft_engine::load::Base;
use ft_engine::ranks::{self, Comm, Mesh, Threads};
use ft_kernels::cuda;
use ft_recipe::Parallel;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Threads of the ranks other than the first.
pub struct RankThreads {
    threads: Vec<(usize, JoinHandle<()>)>,
    patience: Duration,
}

/// Creates the ranks of a run: the first, and the others.
pub fn group(p: &Parallel) -> (Threads, Vec<Threads>) {
    let mut all = ranks::group_of(&Mesh::of(p), Duration::from_secs(p.timeout));
    let others = all.split_off(1);
    (all.swap_remove(0), others)
}

impl RankThreads {
    /// Starts one thread per rank.
    pub fn start(ranks: Vec<Threads>, inputs: &Arc<RunInputs>, base: &Base) -> ft_base::Result<Self> {
        let patience = Duration::from_secs(inputs.job.recipe.parallel.timeout);
        let mut all = Self { threads: Vec::new(), patience };
        for comm in ranks {
            let (rank, inputs, base) = (comm.rank(), Arc::clone(inputs), base.clone());
            let thread = std::thread::Builder::new().name(format!("rank {rank}"));
            let started = thread.spawn(move || {
                place::follow();
                let threads = start_threads_of(rank, &inputs.job.recipe.parallel);
                let outcome = threads
                    .map_err(ft_base::Error::from)
                    .and_then(|_threads| follow_on_device(&inputs, &base, &comm));
                if let Err(e) = outcome {
                    let e = inputs.planned.explain(e);
                    comm.fail(&e);
                    exit_if_first_hangs(&e);
                }
            });
            let started = started.map_err(|e| Error::Usage(format!("rank {rank} cannot start: {e}")))?;
            all.threads.push((rank, started));
        }
        Ok(all)
    }

    /// Waits for the threads to end, except for a rank that hangs.
    pub fn end<T>(self, outcome: &ft_base::Result<T>) {
        let hangs = outcome.as_ref().err().and_then(|e| e.of::<ranks::Error>()).filter(|e| e.hangs);
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
fn follow_on_device(inputs: &RunInputs, base: &Base, comm: &dyn Comm) -> ft_base::Result<()> {
    let job = if inputs.job.device.is_cuda() {
        Arc::new(inputs.job.on(cuda::open(comm.rank()).map_err(Error::Device)?))
    } else {
        Arc::clone(&inputs.job)
    };
    let inputs = RunInputs { job, ..inputs.clone() };
    on_device(&inputs.job, comm, |comm| follow(&inputs, base, comm, &|| 0))
}

/// If the first rank hangs, another rank must end the process.
fn exit_if_first_hangs(e: &ft_base::Error) {
    if let Some(lost) = e.of::<ranks::Error>().filter(|l| l.hangs && l.rank == 0) {
        tell(&format!("error: {lost}"));
        lost.code.end_process();
    }
}
