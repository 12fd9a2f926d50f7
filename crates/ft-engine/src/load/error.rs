//! Errors of loading.

use ft_base::error::{ExitCode, Failure};

/// Errors in a base.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The tensors do not match the config.
    #[error("{dir}: {why}")]
    Tensors {
        dir: String,
        /// Missing, unexpected or misshapen tensors, one per line.
        why: String,
    },
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        ExitCode::Model
    }
}
