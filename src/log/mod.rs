//! What a run tells: progress on the terminal, `metrics.jsonl` in the run folder, a report from it.

pub mod limits;
pub mod memory;
mod metrics;
pub mod place;
#[cfg(target_os = "linux")]
mod pool;
#[cfg(not(target_os = "linux"))]
#[path = "no_pool.rs"]
mod pool;
mod progress;
pub mod report;

pub use metrics::Metrics;
pub use metrics::read as read_metrics;
pub use progress::{Progress, Told, bytes_bar};

use std::io::Write;

/// Prints a line on stderr. A stderr that nobody reads any more must not end a run, as `eprintln!` would.
pub fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// As [`tell`], with `warning: ` in front.
pub fn warn(text: &str) {
    tell(&format!("warning: {text}"));
}
