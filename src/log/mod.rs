//! Output of a run: messages and progress on the terminal, `metrics.jsonl` in the run folder,
//! TensorBoard files; also memory accounting.

mod metrics;
mod table;
mod tensorboard;

pub use metrics::Metrics;
pub use metrics::{last as last_event, read as read_metrics, unix_time};
pub use tensorboard::TensorBoard;
