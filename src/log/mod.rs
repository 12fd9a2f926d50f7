//! What a run tells: progress on the terminal, `metrics.jsonl` in the run folder.

pub mod memory;
mod metrics;
mod progress;

pub use metrics::Metrics;
pub use metrics::read as read_metrics;
pub use progress::{Progress, Told, bytes_bar};
