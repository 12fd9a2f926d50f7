//! Error of a GGUF export.

use ft_base::error::{ExitCode, Failure};

/// A model or adapter unsupported by llama.cpp.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {why}")]
pub struct Error {
    /// File, key or tensor.
    pub place: String,
    /// Reason and hint.
    pub why: String,
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        ExitCode::Model
    }
}

pub(super) fn refuse<T>(place: impl Into<String>, why: impl Into<String>) -> Result<T, Error> {
    Err(Error { place: place.into(), why: why.into() })
}
