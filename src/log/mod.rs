//! Output of a run besides the terminal.
//!
//! ```text
//! metrics       metrics.jsonl, the source of all others
//! logger        what receives its events, and their numbers
//!   table         metrics.csv
//!   tensorboard   event files
//!   mlflow        a tracking server
//! observer      a function of the program that trains
//! ```

mod logger;
mod metrics;
#[cfg(feature = "hub")]
mod mlflow;
mod observer;
mod table;
mod tensorboard;

pub use logger::{is_of_documents, is_of_signal, perplexity};
pub use metrics::Metrics;
pub use metrics::{last as last_event, read as read_metrics, unix_time};
#[cfg(feature = "hub")]
pub use mlflow::{MlFlow, MlFlowRun};
pub use observer::{Event, Observer};
pub use tensorboard::TensorBoard;
