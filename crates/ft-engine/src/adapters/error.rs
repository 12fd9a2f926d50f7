//! Errors in adapters and selections.

use ft_base::error::{ExitCode, Failure};

/// Errors in adapters and selections.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A `[[train]]` rule does not apply to this model.
    #[error("{place}: train.{rule}: {why}")]
    Rule {
        /// File and line of the rule.
        place: String,
        /// Index of the rule, from 0.
        rule: usize,
        why: String,
    },
    /// No tensor trains.
    #[error("{place}: nothing trains\n  hint: add a [[train]] rule, or name an adapter in lora.init")]
    Nothing {
        /// File of the recipe.
        place: String,
    },
    /// A key that does not apply to this model or base: `lora.init`, a learning rate, a rule on a 4-bit weight.
    #[error("{place}: {why}")]
    Key {
        /// File and line of the key, the key, or the module.
        place: String,
        /// Reason and hint.
        why: String,
    },
    /// An invalid adapter config or tensor, or a base that it cannot be merged into.
    #[error("{file}: {why}")]
    Peft { file: String, why: String },
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::Rule { .. } | Error::Nothing { .. } | Error::Key { .. } => ExitCode::Usage,
            Error::Peft { .. } => ExitCode::Model,
        }
    }
}
