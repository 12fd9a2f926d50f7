//! Errors of reports.

use ft_base::error::{ExitCode, Failure};
use ft_base::store;
use std::path::PathBuf;

/// Why no report was written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder has no metrics.
    #[error(
        "cannot read {}: {source}\nhint: `ft report` takes the folder of a run: what `ft run` calls \
            run.output, runs/NAME by default",
        path.display()
    )]
    NoMetrics {
        /// Path of the missing metrics file.
        path: PathBuf,
        source: std::io::Error,
    },
    /// The metrics file has no event.
    #[error("{}: no event of a run is in it; the file is empty, or another program's", path.display())]
    Nothing {
        /// The metrics file.
        path: PathBuf,
    },
    /// More runs than distinguishable line styles.
    #[error("{runs} runs: one page shows {most} at the most")]
    Many {
        /// Number of runs given.
        runs: usize,
        most: usize,
    },
    /// A file that could not be read or written.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// A template error: a bug in ft.
    #[error("the page of the report: {0}\n  this is a bug in ft: please report it")]
    Page(#[from] minijinja::Error),
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::NoMetrics { .. } | Error::Nothing { .. } => ExitCode::Storage,
            Error::Store(e) => e.exit_code(),
            Error::Many { .. } => ExitCode::Usage,
            Error::Page(_) => ExitCode::Internal,
        }
    }
}
