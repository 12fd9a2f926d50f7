//! Memory in use: resident size from the system, and allocated bytes counted by the global allocator.

mod allocator;
mod counts;
pub mod limits;
mod phase;
pub mod place;
#[cfg(target_os = "linux")]
mod pool;
#[cfg(not(target_os = "linux"))]
#[path = "no_pool.rs"]
mod pool;
mod process;

pub use allocator::{CountingAllocator, keep_within, on_failure};
pub use counts::{COUNTED, count_for, largest_rank, live_bytes, peak_bytes, reset_peak, reset_ranks};
pub use place::phase_peaks;
pub use process::{
    available_bytes, host_bytes, on_stack, part, peak_host_bytes, reach_bytes, room_for_thread, share_among,
};
