//! Thread pools of a process and of its ranks.

use crate::train::Error;
use ft_base::memory;
use ft_recipe::Parallel;
use rayon::ThreadPool;
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;

/// Variable of the library with the number of threads.
const THREADS: &str = "RAYON_NUM_THREADS";
/// Most threads, except on more processors. Idle ones look for work at one another: many start slowly.
const MOST: usize = 1024;

/// Starts the global thread pool. Also turns SIGXFSZ into a write error: without a handler, the system
/// would end the process at the file size limit.
///
/// # Errors
/// Too many threads; a limit of the system.
pub fn start_threads() -> ft_base::Result<()> {
    let most = thread::available_parallelism().map_or(1, usize::from).max(MOST);
    let told = std::env::var(THREADS).ok().and_then(|n| n.parse::<usize>().ok());
    if let Some(n) = told.filter(|n| *n > most) {
        return Err(Error::Usage(format!("{THREADS}: {n}; at most {most} threads start here")).into());
    }
    // Any handler suffices to make the write fail.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    // A process that runs several subcommands starts the pool once.
    static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
    let started = STARTED.get_or_init(|| {
        let pool = rayon::ThreadPoolBuilder::new().spawn_handler(start_thread);
        pool.build_global().map_err(|e| e.to_string())
    });
    started.clone().map_err(|e| {
        let hint = format!("hint: fewer of them ({THREADS}=1), or a higher limit (ulimit -u, -v)");
        ft_plan::Error::DoesNotFit(format!("threads cannot start: {e}\n  {hint}")).into()
    })
}

/// Starts the thread pool of a rank, including the current thread. Ranks in one process divide the threads
/// evenly. Allocations of the pool count for the rank.
pub fn start_threads_of(rank: usize, p: &Parallel) -> Result<ThreadPool, ft_plan::Error> {
    memory::count_for(Some(rank));
    pool_with_this(p.threads(rayon::current_num_threads()), Some(rank))
}

/// Starts the thread pool of this process, including the current thread. The processors are shared by
/// `others` processes, this one included.
pub fn start_threads_beside(others: usize) -> Result<ThreadPool, ft_plan::Error> {
    // the number applies to every process separately
    let told = std::env::var_os(THREADS).is_some_and(|n| !n.is_empty());
    let all = rayon::current_num_threads();
    pool_with_this(if told { all } else { (all / others.max(1)).max(1) }, None)
}

fn pool_with_this(threads: usize, rank: Option<usize>) -> Result<ThreadPool, ft_plan::Error> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).use_current_thread();
    let pool = pool.start_handler(move |_| memory::count_for(rank)).spawn_handler(start_thread).build();
    pool.map_err(|e| ft_plan::Error::DoesNotFit(format!("threads of a rank cannot start: {e}")))
}

/// Starts a thread of the pool and returns once the thread runs: the start-up memory is then counted when the next
/// thread checks for room.
fn start_thread(thread: rayon::ThreadBuilder) -> std::io::Result<()> {
    /// Stack size in bytes, the default of the standard library.
    const STACK: usize = 2 << 20;
    memory::room_for_thread(STACK)?;
    let (began, begins) = mpsc::channel();
    thread::Builder::new().stack_size(STACK).spawn(move || {
        // Sending allocates: from here on, the allocator holds state for this thread.
        let _ = began.send(());
        thread.run();
    })?;
    begins.recv().map_err(std::io::Error::other)
}
