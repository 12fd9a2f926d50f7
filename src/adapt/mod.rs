//! What trains.

use crate::error::ExitCode;

/// Problems of adapters and selection.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub String);

impl Error {
    /// The exit code that this error ends the process with.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::Model
    }
}
