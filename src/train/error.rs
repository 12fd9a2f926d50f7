//! Errors of a run.

use ft_base::error::{ExitCode, Failure};
use ft_recipe::Recipe;
use std::fmt::Display;

/// Errors of a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device is missing, or a library for it.
    #[error("run.device = \"cuda\": {0}\n  hint: run.device=cpu")]
    Device(String),
    /// Settings do not fit the model, the data, the machine, or one another.
    #[error("{0}")]
    Usage(String),
    /// The run folder already holds checkpoints or a result.
    #[error("{dir}: has {what}\n  hint: {hint}--overwrite starts anew, run.output=DIR writes elsewhere")]
    Exists {
        /// The run folder.
        dir: String,
        /// Contents found in the folder.
        what: String,
        /// Alternatives to overwriting; may be empty.
        hint: &'static str,
    },
    /// A resumed run would compute something other than the checkpointed run.
    #[error(
        "{dir}: cannot go on: what decides the mathematics has changed since the \
            checkpoint\n{changes}\n  hint: {hint}"
    )]
    Changed {
        /// The run folder.
        dir: String,
        /// One line per change.
        changes: String,
        /// Suggested remedy.
        hint: &'static str,
    },
    /// A checkpoint is unreadable or does not fit this run.
    #[error("{path}: {why}")]
    Checkpoint {
        /// Folder or file of the checkpoint.
        path: String,
        /// Cause.
        why: String,
    },
    /// The loss or the gradient norm is not finite.
    #[error("step {step}: {what} is not finite; {updated}\n{detail}\n  hint: {hint}")]
    NonFinite {
        /// Step, from 1.
        step: u64,
        /// State of the weights at the error.
        updated: &'static str,
        /// The quantity: loss, gradient norm, or square of the gradient norm.
        what: &'static str,
        /// Tensors and data lines involved.
        detail: String,
        /// Suggested remedy.
        hint: &'static str,
    },
    /// An update produced non-finite weights or moments. These are not saved.
    #[error(
        "step {step}: the update made weights or moments that are not finite: {tensors}\n  they are \
            not saved; checkpoints before are whole\n  hint: a lower optimizer.lr, run.clip, or \
            optimizer.eps as it is by default"
    )]
    Weights {
        /// Step, from 1.
        step: u64,
        /// Names of up to five tensors, and the number of further ones.
        tensors: String,
    },
    /// The run has diverged: gradients are zero, and logits are constant over the vocabulary.
    #[error(
        "step {step}: the run has diverged: no gradient in the last {steps} steps, loss {loss:.4}, \
            and the model gives every token the same logit\n  checkpoints before are whole; nothing \
            else is written\n  hint: a lower optimizer.lr, or run.clip; --overwrite starts anew"
    )]
    Diverged {
        /// Step, from 1.
        step: u64,
        /// Number of consecutive steps without a gradient.
        steps: u64,
        /// Loss of the last step.
        loss: f64,
    },
    /// The backward pass missed some of the selected tensors.
    #[error(
        "step 1: the backward pass did not reach {count} of the tensors that the recipe trains: \
            {names}\n  this is a bug in ft: please report it with the recipe"
    )]
    Unreached {
        /// Number of missed tensors.
        count: usize,
        /// Names of up to five tensors.
        names: String,
    },
    /// The result on disk gives other logits than the trained model.
    #[error(
        "{path}: read back, it gives other logits: {apart:.1e} apart (relative), at most {bar:.0e} is \
            wanted\n  the checkpoint of the last step is whole; this is a bug in ft: please report it"
    )]
    Readback {
        /// Folder of the result.
        path: String,
        /// Relative L2 distance of the logits.
        apart: f64,
        /// Tolerance.
        bar: f64,
    },
    /// The merged weights give other logits than base and adapter.
    #[error(
        "{path}: the merged weights give other logits than base and adapter: {apart:.1e} apart \
            (relative), at most {bar:.0e} is explained by f32\n  nothing was written there; this is a \
            bug in ft: please report it"
    )]
    Merged {
        /// Folder of the merged model.
        path: String,
        /// Relative L2 distance of the logits.
        apart: f64,
        /// Tolerance, from the order of sums in f32.
        bar: f64,
    },
    /// A tensor on disk differs from the merged weight rounded to the dtype of the file.
    #[error(
        "{path}: {name}: read back, it is not the merged weight rounded to its dtype\n  nothing was \
            written there\n  hint: look at the disk, and merge again"
    )]
    Unequal {
        /// Folder of the merged model.
        path: String,
        /// Name of the tensor.
        name: String,
    },
    /// `ft eval` computed a non-finite loss.
    #[error(
        "the loss on the evaluation data is not finite\n  hint: look at the model's weights and at \
            these rows with `ft data`"
    )]
    Evaluation,
    /// An evaluation during a run computed a non-finite loss.
    #[error(
        "evaluation after step {step}: the loss is not finite\n  {kept}\n  hint: look at the rows of \
            data.eval; if the training loss grew, a lower optimizer.lr, or run.clip"
    )]
    EvaluationOf {
        /// Number of completed steps.
        step: u64,
        /// State saved before the error.
        kept: &'static str,
    },
    /// A signal stopped the run.
    #[error("stopped by {name} {saved}")]
    Signal {
        /// SIGINT, SIGTERM, SIGHUP or SIGUSR1.
        name: &'static str,
        /// Completed steps, saved state, and the command to continue with.
        saved: String,
        /// Exit code of the process.
        code: ExitCode,
    },
    /// Ranks disagree about the protocol between them.
    #[error("{0}\n  this is a bug in ft: please report it")]
    Internal(String),
    /// A step or an evaluation was abandoned because some rank received a signal. Holds the 1-based index
    /// of the signal in the table of handled signals.
    #[error("given up")]
    Abandoned(u64),
}

impl Error {
    /// Error of settings, at the place of a recipe key.
    pub fn at(recipe: &Recipe, key: &str, why: impl Display) -> Self {
        Self::Usage(format!("{}: {why}", recipe.place(key)))
    }
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
            Error::Unreached { .. } | Error::Internal(_) => ExitCode::Internal,
            Error::Abandoned(_) => ExitCode::Interrupted,
            Error::Signal { code, .. } => *code,
        }
    }
}
