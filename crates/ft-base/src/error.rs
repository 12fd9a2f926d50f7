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

impl ExitCode {
    /// That of a number, as another process ends with it; else [`ExitCode::Internal`].
    pub fn of(code: u8) -> Self {
        use ExitCode::*;
        let all = [
            Done,
            Usage,
            Data,
            Model,
            Storage,
            NonFinite,
            LostRank,
            DoesNotFit,
            HungUp,
            Interrupted,
            Terminated,
        ];
        all.into_iter().find(|c| *c as u8 == code).unwrap_or(Internal)
    }
}

/// What a module's error type says beside its message.
pub trait Failure: std::error::Error + Send + Sync + 'static {
    /// The exit code that the error ends the process with.
    fn exit_code(&self) -> ExitCode;
}

/// Any error of the library: the error of a module, whichever it is.
#[derive(Debug)]
pub struct Error(Box<dyn Failure>);

impl<E: Failure> From<E> for Error {
    fn from(e: E) -> Self {
        Self(Box::new(e))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

impl Error {
    /// The exit code that this error ends the process with.
    pub fn exit_code(&self) -> ExitCode {
        self.0.exit_code()
    }

    /// The error of a module, if it is this one's.
    pub fn of<E: Failure>(&self) -> Option<&E> {
        let e: &(dyn std::error::Error + 'static) = &*self.0;
        e.downcast_ref()
    }
}

/// A tensor operation that fails is a bug of ours, unless a device had no memory left.
#[cfg(feature = "candle")]
impl Failure for candle_core::Error {
    fn exit_code(&self) -> ExitCode {
        let text = self.to_string().to_lowercase();
        match text.contains("out of memory") || text.contains("out_of_memory") {
            true => ExitCode::DoesNotFit,
            false => ExitCode::Internal,
        }
    }
}

/// A place in a text file, for messages: `recipe.toml:12:5`.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
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
