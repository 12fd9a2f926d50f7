//! What trains: selection of modules, the buffers of trained tensors, LoRA's initial values, PEFT files.

pub mod adapter;
pub mod buffer;
pub mod build;
pub mod export;
pub mod ghost;
pub mod initial;
pub mod layout;
pub mod learning_rates;
mod loader;
pub mod moments;
pub mod params;
pub mod peft;
pub mod peft_config;
pub mod projected;
pub mod selection;
mod split;
#[cfg(test)]
mod tests;
pub mod tokens;

pub use adapter::Adapter;
pub use learning_rates::LearningRate;
pub use params::Params;
pub use peft_config::PeftConfig;
pub use selection::{Choice, Selection, Trained};

use ft_base::error::{ExitCode, Failure};

/// Problems of adapters and selection.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A `[[train]]` rule cannot be applied to this model.
    #[error("{place}: train.{rule}: {why}")]
    Rule {
        /// Where the rule stands.
        place: String,
        /// Its number, from 0.
        rule: usize,
        /// What is wrong.
        why: String,
    },
    /// Nothing trains.
    #[error("{place}: nothing trains\n  hint: add a [[train]] rule, or name an adapter in lora.init")]
    Nothing {
        /// The recipe.
        place: String,
    },
    /// Initial values that cannot be.
    #[error("{place}: {why}")]
    Initial {
        /// Where `lora.init` stands.
        place: String,
        /// What is wrong.
        why: String,
    },
    /// A learning rate that cannot be.
    #[error("{place}: {why}")]
    LearningRate {
        /// Where it stands.
        place: String,
        /// What is wrong.
        why: String,
    },
    /// An adapter's config or tensors.
    #[error("{file}: {why}")]
    Peft {
        /// The file.
        file: String,
        /// What is wrong.
        why: String,
    },
    /// What a rule or adapter asks of a 4-bit weight.
    #[error("{module}: {why}")]
    FourBit {
        /// The module.
        module: String,
        /// What is wrong, and what to do.
        why: String,
    },
    /// A base that cannot take the adapter in.
    #[error("{dir}: {why}")]
    Merge {
        /// The base's folder.
        dir: String,
        /// What is wrong.
        why: String,
    },
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::Rule { .. }
            | Error::Nothing { .. }
            | Error::FourBit { .. }
            | Error::Initial { .. }
            | Error::LearningRate { .. } => ExitCode::Usage,
            Error::Peft { .. } | Error::Merge { .. } => ExitCode::Model,
        }
    }
}
