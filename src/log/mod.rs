//! Output of a run: messages and progress on the terminal, `metrics.jsonl` in the run folder,
//! TensorBoard files; also memory accounting.

pub mod limits;
pub mod memory;
mod metrics;
pub mod panics;
pub mod place;
#[cfg(target_os = "linux")]
mod pool;
#[cfg(not(target_os = "linux"))]
#[path = "no_pool.rs"]
mod pool;
mod progress;
mod screen;
mod table;
mod tensorboard;

pub use metrics::Metrics;
pub use metrics::{last as last_event, read as read_metrics, unix_time};
pub use progress::{Progress, Told, bytes_bar, rows_bar};
pub use screen::{
    Escaped, color_on_stderr, color_on_stdout, escape, hush, moves_cursor, print, shell_word, tell,
    tell_escaped, to_file, to_terminal, warn,
};
pub use tensorboard::TensorBoard;
