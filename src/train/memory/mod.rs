//! Memory of a run: limits, measurements, out-of-memory reports, thread pools.

pub mod limits;
mod monitor;
mod out_of_memory;
mod threads;

pub use monitor::MemoryMonitor;
pub use out_of_memory::{Planned, tell_failures};
pub use threads::{start_threads, start_threads_beside, start_threads_of};
