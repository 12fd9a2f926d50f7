//! Records of a run: `metrics.jsonl`, `metrics.csv`, TensorBoard's event files.

mod metrics;
mod table;
mod tensorboard;

pub use metrics::Metrics;
pub use metrics::{last as last_event, read as read_metrics, unix_time};
pub use tensorboard::TensorBoard;
