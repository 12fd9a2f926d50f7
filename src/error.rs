//! What can go wrong, and the exit code that each kind ends the process with.

use std::fmt;

/// The exit codes of the `ft` binary.
///
/// They are part of the interface: scripts and job schedulers decide by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    /// Done.
    Done = 0,
    /// A bug in `ft` or in a library below it.
    Internal = 1,
    /// The recipe, or how the command was called; also a device that is not there.
    Usage = 2,
    /// A data file, or a row of one; also a data file that is not there.
    Data = 3,
    /// Model or adapter files; also a hub that cannot be reached.
    Model = 4,
    /// A disk that is full, read-only or broken; checkpoints.
    Storage = 5,
    /// A loss, gradient or norm that is not finite.
    NonFinite = 6,
    /// A rank that is gone.
    LostRank = 7,
    /// It does not fit in memory.
    DoesNotFit = 8,
    /// SIGHUP, after a checkpoint.
    HungUp = 129,
    /// SIGINT, after a checkpoint.
    Interrupted = 130,
    /// SIGTERM, after a checkpoint.
    Terminated = 143,
}

/// Any error of the library: one enum a module below it, joined here.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The recipe, or its overrides on the command line.
    #[error(transparent)]
    Recipe(#[from] crate::recipe::Error),
    /// Data files and rows, tokenizers and chat templates.
    #[error(transparent)]
    Data(#[from] crate::data::Error),
    /// The hub and its cache.
    #[error(transparent)]
    Hub(#[from] crate::hub::Error),
    /// Files of tensors, checkpoints.
    #[error(transparent)]
    Store(#[from] crate::store::Error),
    /// The model's config.
    #[error(transparent)]
    Model(#[from] crate::model::Error),
    /// 4-bit weights.
    #[error(transparent)]
    Quant(#[from] crate::quant::Error),
    /// What trains, and adapters.
    #[error(transparent)]
    Adapt(#[from] crate::adapt::Error),
    /// A plan that does not fit.
    #[error(transparent)]
    Plan(#[from] crate::plan::Error),
    /// The report of a run.
    #[error(transparent)]
    Report(#[from] crate::log::report::Error),
    /// Logits that are not finite.
    #[error(transparent)]
    Logits(#[from] crate::walk::NotFinite),
    /// The training loop.
    #[error(transparent)]
    Train(#[from] crate::train::Error),
    /// A tensor operation failed in candle: a bug of ours unless it is out of memory.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl Error {
    /// The exit code that this error ends the process with.
    pub fn exit_code(&self) -> ExitCode {
        if self.is_out_of_memory() {
            return ExitCode::DoesNotFit;
        }
        match self {
            Error::Recipe(e) => e.exit_code(),
            Error::Data(e) => e.exit_code(),
            Error::Hub(e) => e.exit_code(),
            Error::Store(e) => e.exit_code(),
            Error::Model(_) => ExitCode::Model,
            Error::Quant(e) => e.exit_code(),
            Error::Adapt(e) => e.exit_code(),
            Error::Plan(e) => e.exit_code(),
            Error::Report(e) => e.exit_code(),
            Error::Logits(_) => ExitCode::NonFinite,
            Error::Train(e) => e.exit_code(),
            Error::Tensor(_) => ExitCode::Internal,
        }
    }
}

impl Error {
    /// Whether a device had no memory left.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::Tensor(e) | Error::Model(crate::model::Error::Tensor(e)) => says_out_of_memory(e),
            Error::Store(crate::store::Error::Tensor { source, .. }) => says_out_of_memory(source),
            _ => false,
        }
    }
}

fn says_out_of_memory(e: &candle_core::Error) -> bool {
    let text = e.to_string().to_lowercase();
    text.contains("out of memory") || text.contains("out_of_memory")
}

/// A place in a text file, for messages: `recipe.toml:12:5`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file, or another name for where the text came from ("command line").
    pub file: String,
    /// Line, from 1; 0 when there is none.
    pub line: usize,
    /// Column in characters, from 1; 0 when there is none.
    pub column: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
            if self.column > 0 {
                write!(f, ":{}", self.column)?;
            }
        }
        Ok(())
    }
}

/// A result with the library's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;
