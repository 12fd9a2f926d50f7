//! Errors in a model's config.

use ft_base::error::{ExitCode, Failure};

/// Errors in a model's config.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("{file}: cannot be read: {source}")]
    Read { file: String, source: std::io::Error },
    /// The file is not UTF-8 or not a JSON object.
    #[error("{file}: {why}")]
    Syntax {
        file: String,
        /// Description of the problem, with line and column if known.
        why: String,
    },
    /// Unknown `model_type`.
    #[error("{file}: model_type: {found} is not a family that ft knows\n  hint: known are {known}")]
    Architecture {
        file: String,
        /// Value of `model_type` in the file.
        found: String,
        /// Comma-separated list of supported families.
        known: String,
    },
    /// A key is missing, malformed or not supported.
    #[error("{file}: {key}: {why}")]
    Key {
        file: String,
        /// Key, with dots for nested tables.
        key: String,
        why: String,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::Tensor(e) if e.exit_code() == ExitCode::DoesNotFit => ExitCode::DoesNotFit,
            _ => ExitCode::Model,
        }
    }
}

/// Result with an [`Error`] of the config.
pub type Result<T, E = Error> = std::result::Result<T, E>;
