//! Training: the step, the loop over steps, evaluation, checkpoints, and the result of a run.
//!
//! ```text
//! run          the first rank: checks, the loop over steps, metrics, signals
//!   ranks      the other ranks, as threads or processes
//!   output     the result: written, read back, compared
//!   checkpoint contents of a checkpoint, identity of a run
//!   eval       evaluation loss, generated answers, divergence
//!   objective  tasks with a loss of whole documents
//!   preference losses of pairs and rated completions, the reference
//!   distill    losses on a teacher's probabilities; the teacher's pass
//!   classify   cross-entropy over classes, accuracy and F1
//!   step       gradients over micro-batches, reduction over ranks, update
//!   memory     limits, measurements, out-of-memory reports
//!   job        the resolved recipe
//! bench, merge build on these.
//! ```
//!
//! Errors of the disk and the device, lost ranks and errors of called items are documented here only. `# Errors`
//! sections name further errors.

mod auto_layout;
pub mod bench;
pub mod checkpoint;
mod classify;
mod distill;
mod error;
mod eval;
pub mod job;
pub mod layout;
pub mod memory;
pub mod merge;
mod objective;
pub mod output;
mod preference;
mod ranks;
mod run;
pub mod session;
pub mod step;

#[cfg(test)]
mod tests;

pub use auto_layout::choose as choose_layout;
pub use distill::{TeacherFiles, TeacherModel, check as check_taught, write_teacher};
pub use error::Error;
pub use eval::{add_to, check_questions, evaluate_loaded, score, scores_line};
pub use job::{Job, rows, sources};
pub use merge::compare;
pub use output::logits_apart;
pub use preference::reference_model;
pub use ranks::{carries_nothing, check as check_ranks, check_comm};
pub use run::{Options, Outcome, check_writable, log, run, server, signals};
pub use session::{Run, Session};
pub use step::{LossScale, StepInput, StepOutput, TrainContext, TrainedModel};
