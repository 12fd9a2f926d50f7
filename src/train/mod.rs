//! The step and the loop, evaluation, what a checkpoint holds, what a run writes at its end.

mod answers;
pub mod bench;
mod best;
pub mod compare;
mod earlier;
pub mod exhausted;
mod finished;
mod gather;
mod guard;
mod identity;
pub mod job;
pub mod latest;
mod loss_scale;
pub mod merge;
pub mod output;
mod processes;
mod products;
pub mod quantize;
mod ranks;
mod reduce;
pub mod rows;
mod run;
mod running;
pub mod server;
mod signals;
pub mod sources;
pub mod state;
pub mod step;
mod watch;

#[cfg(test)]
mod again_tests;
#[cfg(test)]
mod composed_tests;
#[cfg(test)]
mod ranks_tests;

pub use answers::{add_to, line as scores_line, score};
pub use job::Job;
pub use loss_scale::LossScale;
pub use output::logits_apart;
pub use ranks::carries_nothing;
pub use run::{Options, Outcome, run};
pub use step::{StepRows, Stepped, evaluate, train_step};

use ft_base::error::{ExitCode, Failure};

/// Problems of a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No such device.
    #[error("run.device = \"cuda\": {0}\n  hint: run.device=cpu")]
    Device(String),
    /// Something the recipe asks for does not fit the rest.
    #[error("{0}")]
    Usage(String),
    /// The run folder has checkpoints or a result.
    #[error("{dir}: has {what}\n  hint: {hint}--overwrite starts anew, run.output=DIR writes elsewhere")]
    Exists {
        /// The run folder.
        dir: String,
        /// What is there.
        what: String,
        /// What else can be done.
        hint: &'static str,
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
    /// A loss or gradient that is not finite.
    #[error("step {step}: {what} is not finite; {updated}\n{detail}\n  hint: {hint}")]
    NonFinite {
        /// Step, from 1.
        step: u64,
        /// What was updated nevertheless.
        updated: &'static str,
        /// Loss, or gradient norm.
        what: &'static str,
        /// Tensors and rows.
        detail: String,
        /// What to do.
        hint: &'static str,
    },
    /// Weights that an update made infinite; they were not saved.
    #[error(
        "step {step}: the update made weights or moments that are not finite: {tensors}\n  they are not saved; checkpoints before are whole\n  hint: a lower optimizer.lr, run.clip, or optimizer.eps as it is by default"
    )]
    Weights {
        /// Step, from 1.
        step: u64,
        /// Some of them.
        tensors: String,
    },
    /// A model that says the same whatever it reads, and does not learn.
    #[error(
        "step {step}: the run has diverged: no gradient in the last {steps} steps, loss {loss:.4}, and the model gives every token the same logit\n  checkpoints before are whole; nothing else is written\n  hint: a lower optimizer.lr, or run.clip; --overwrite starts anew"
    )]
    Diverged {
        /// Step, from 1.
        step: u64,
        /// How many steps had no gradient.
        steps: u64,
        /// The loss.
        loss: f64,
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
        "{path}: the merged weights give other logits than base and adapter: {apart:.1e} apart (relative), at most {bar:.0e} is explained by f32\n  nothing was written there; this is a bug in ft: please report it"
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
        "{path}: {name}: read back, it is not the merged weight rounded to its dtype\n  nothing was written there\n  hint: look at the disk, and merge again"
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
    /// An evaluation in a run that gives no number.
    #[error(
        "evaluation after step {step}: the loss is not finite\n  {kept}\n  hint: look at the rows of data.eval; if the training loss grew, a lower optimizer.lr, or run.clip"
    )]
    EvaluationOf {
        /// Steps that were done.
        step: u64,
        /// What there is of the run.
        kept: &'static str,
    },
    /// A signal came.
    #[error("stopped by {name} {saved}")]
    Signal {
        /// SIGINT, SIGTERM or SIGHUP.
        name: &'static str,
        /// After which step, what is saved, and what to do.
        saved: String,
        /// Exit code.
        code: ExitCode,
    },
    /// A step or evaluation was given up because a signal came, to this rank or another: its number among those that a run looks for.
    #[error("given up")]
    Abandoned(u64),
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::Device(_) | Error::Usage(_) | Error::Exists { .. } | Error::Changed { .. } => {
                ExitCode::Usage
            }
            Error::Checkpoint { .. }
            | Error::Readback { .. }
            | Error::Merged { .. }
            | Error::Unequal { .. } => ExitCode::Storage,
            Error::NonFinite { .. }
            | Error::Weights { .. }
            | Error::Diverged { .. }
            | Error::Evaluation
            | Error::EvaluationOf { .. } => ExitCode::NonFinite,
            Error::Unreached { .. } => ExitCode::Internal,
            Error::Abandoned(_) => ExitCode::Interrupted,
            Error::Signal { code, .. } => *code,
        }
    }
}
