//! Errors of loading a recipe.

use crate::syntax::{Diagnostic, Problems};
use ft_base::error::{ExitCode, Failure};
use std::path::PathBuf;

/// Size limit of a recipe file in bytes. Typical recipes have a few thousand.
pub(crate) const LARGEST: u64 = 256 << 10;

/// Errors of loading a recipe.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read the recipe {}: {source}{hint}", path.display())]
    Read {
        /// The recipe's path.
        path: PathBuf,
        /// I/O error.
        source: std::io::Error,
        /// Advice: a line break and `hint: ...`, or empty.
        hint: String,
    },
    /// The file exceeds the size limit.
    #[error("{} has {bytes} bytes: a recipe has at most {LARGEST}", path.display())]
    TooLarge {
        /// The recipe's path.
        path: PathBuf,
        /// File size in bytes.
        bytes: u64,
    },
    /// Problems in the recipe or on the command line.
    #[error("{0}")]
    Problems(Problems),
    /// No shipped recipe has this name.
    #[error("no shipped recipe is called {name:?}\nhint: {hint}")]
    NoSuchRecipe {
        /// The requested name.
        name: String,
        /// Advice.
        hint: String,
    },
    /// Writing a recipe or the schema to stdout failed.
    #[error("cannot write to stdout: {0}")]
    Print(std::io::Error),
}

impl Failure for Error {
    /// [`ExitCode::Usage`], except for a failed write to stdout.
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::Print(_) => ExitCode::Storage,
            _ => ExitCode::Usage,
        }
    }
}

impl Error {
    /// The result of printing. A closed pipe (`ft schema | head`) is not an error.
    pub fn of_print(outcome: std::io::Result<()>) -> Result<(), Error> {
        match outcome {
            Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::Print(e)),
            _ => Ok(()),
        }
    }

    /// The problems in the recipe; empty for another kind of error.
    pub fn problems(&self) -> &[Diagnostic] {
        match self {
            Error::Problems(p) => p.list(),
            _ => &[],
        }
    }

    /// The message, in color if `color`; see [`ft_base::terminal::color_on_stderr`].
    pub fn render(&self, color: bool) -> String {
        match self {
            Error::Problems(p) => p.render(color),
            other => other.to_string(),
        }
    }
}
