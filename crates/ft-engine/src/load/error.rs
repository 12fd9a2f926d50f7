//! Error of a model's files.

use ft_base::error::{ExitCode, Failure};

/// A model or adapter that cannot be loaded or exported.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {why}")]
pub struct Error {
    /// Folder, file, key or tensor.
    pub place: String,
    /// Reason and hint.
    pub why: String,
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        ExitCode::Model
    }
}
