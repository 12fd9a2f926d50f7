//! Refusals of a run.

use ft_base::error::{ExitCode, Failure};

/// Why a run is refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It needs more memory or disk than available.
    #[error("{0}")]
    DoesNotFit(String),
    /// The recipe asks for something the engine would ignore.
    #[error("{0}")]
    Ignored(String),
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::DoesNotFit(_) => ExitCode::DoesNotFit,
            Error::Ignored(_) => ExitCode::Usage,
        }
    }
}
