//! The step and the loop, evaluation, what a checkpoint holds, what a run writes at its end.

pub mod bench;
pub mod compare;
pub mod exhausted;
mod guard;
mod identity;
pub mod job;
pub mod merge;
pub mod output;
mod products;
pub mod quantize;
mod run;
mod running;
mod signals;
pub mod state;
pub mod step;
mod watch;

#[cfg(test)]
mod again_tests;

pub use job::Job;
pub use output::logits_apart;
pub use run::{Options, Outcome, run};
pub use step::{Stepped, evaluate, train_step};

use crate::error::ExitCode;

/// Problems of a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No such device.
    #[error("run.device = \"cuda\": {0}\n  hint: run.device=cpu")]
    Device(String),
    /// Something the recipe asks for does not fit the rest.
    #[error("{0}")]
    Usage(String),
    /// The run folder has checkpoints.
    #[error(
        "{dir}: has checkpoints of an earlier run\n  hint: --resume goes on from them, --overwrite starts anew, run.output=DIR writes elsewhere"
    )]
    Exists {
        /// The run folder.
        dir: String,
    },
    /// A resume that is another run.
    #[error(
        "{dir}: cannot go on: what decides the mathematics has changed since the checkpoint\n{changes}\n  hint: put it back, or say --accept-change KEY for each"
    )]
    Changed {
        /// The run folder.
        dir: String,
        /// One line a change.
        changes: String,
    },
    /// A checkpoint that does not fit this run.
    #[error("{path}: {why}")]
    Checkpoint {
        /// Folder of the checkpoint.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// A loss or gradient that is not finite; no weight was changed.
    #[error(
        "step {step}: {what} is not finite; no weight was updated\n{detail}\n  hint: a lower optimizer.lr, run.clip, or a look at these rows with `ft data`"
    )]
    NonFinite {
        /// Step, from 1.
        step: u64,
        /// Loss, or gradient norm.
        what: &'static str,
        /// Tensors and rows.
        detail: String,
    },
    /// The backward pass did not reach what the rules chose.
    #[error(
        "step 1: the backward pass did not reach {count} of the tensors that the recipe trains: {names}\n  this is a bug in ft: please report it with the recipe"
    )]
    Unreached {
        /// How many.
        count: usize,
        /// Some of them.
        names: String,
    },
    /// What was written does not compute what was trained.
    #[error(
        "{path}: read back, it gives other logits: {apart:.1e} apart (relative), at most {bar:.0e} is wanted\n  the checkpoint of the last step is whole; this is a bug in ft: please report it"
    )]
    Readback {
        /// Folder that was written.
        path: String,
        /// Relative L2 distance.
        apart: f64,
        /// What is allowed.
        bar: f64,
    },
    /// Merged weights do not compute what base and adapter do.
    #[error(
        "{path}: the merged weights give other logits than base and adapter: {apart:.1e} apart (relative), at most {bar:.0e} is explained by f32\n  hint: do not use what is in that folder; this is a bug in ft: please report it"
    )]
    Merged {
        /// Folder that was written.
        path: String,
        /// Relative L2 distance.
        apart: f64,
        /// What the order of sums explains.
        bar: f64,
    },
    /// A weight on disk is not the merged one.
    #[error(
        "{path}: {name}: read back, it is not the merged weight rounded to its dtype\n  hint: do not use what is in that folder; look at the disk, and merge again"
    )]
    Unequal {
        /// Folder that was written.
        path: String,
        /// The tensor.
        name: String,
    },
    /// An evaluation that gives no number.
    #[error(
        "the loss on the evaluation data is not finite\n  hint: look at the model's weights and at these rows with `ft data`"
    )]
    Evaluation,
    /// A signal came; a checkpoint was written.
    #[error(
        "stopped by {name} after step {step}; a checkpoint is written\n  hint: the same command with --resume goes on"
    )]
    Signal {
        /// SIGINT or SIGTERM.
        name: &'static str,
        /// Step that was finished.
        step: u64,
        /// Exit code.
        code: ExitCode,
    },
}

impl Error {
    /// The exit code that this error ends the process with.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Error::Device(_) | Error::Usage(_) | Error::Exists { .. } | Error::Changed { .. } => {
                ExitCode::Usage
            }
            Error::Checkpoint { .. }
            | Error::Readback { .. }
            | Error::Merged { .. }
            | Error::Unequal { .. } => ExitCode::Storage,
            Error::NonFinite { .. } | Error::Evaluation => ExitCode::NonFinite,
            Error::Unreached { .. } => ExitCode::Internal,
            Error::Signal { code, .. } => *code,
        }
    }
}
