//! Errors of the library and their exit codes.

use crate::device_error::DeviceError;
use std::fmt;

/// The exit codes of the `ft` binary.
///
/// Part of the interface: scripts and job schedulers depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    /// Success.
    Done = 0,
    /// A bug in `ft` or in a library below it.
    Internal = 1,
    /// An invalid recipe or command line, or a missing device.
    Usage = 2,
    /// A missing data file, or invalid data in one.
    Data = 3,
    /// Invalid model or adapter files, or an unreachable hub.
    Model = 4,
    /// A full, read-only or failing disk, or an unusable checkpoint.
    Storage = 5,
    /// A non-finite loss, gradient or norm.
    NonFinite = 6,
    /// A lost rank.
    LostRank = 7,
    /// The run does not fit in memory.
    DoesNotFit = 8,
    /// SIGHUP, after saving a checkpoint.
    HungUp = 129,
    /// SIGINT, after saving a checkpoint.
    Interrupted = 130,
    /// SIGUSR1, after saving a checkpoint.
    Requested = 138,
    /// SIGTERM, after saving a checkpoint.
    Terminated = 143,
}

impl ExitCode {
    /// Converts the exit status of another `ft` process; unknown values become [`ExitCode::Internal`].
    pub fn of(code: u8) -> Self {
        use ExitCode::*;
        let errors = [Usage, Data, Model, Storage, NonFinite, LostRank, DoesNotFit];
        let others = [Done, HungUp, Interrupted, Requested, Terminated];
        errors.into_iter().chain(others).find(|c| *c as u8 == code).unwrap_or(Internal)
    }

    /// Ends the process without exit handlers: those of a driver release memory that other threads may be using.
    pub fn end_process(self) -> ! {
        signal_hook::low_level::exit(self as i32)
    }
}

/// An error type with an exit code.
pub trait Failure: std::error::Error + Send + Sync + 'static {
    /// The exit code of the process after this error.
    fn exit_code(&self) -> ExitCode;
}

/// Any error of the library: a boxed error of one of the modules.
#[derive(Debug)]
pub struct Error(Box<dyn Failure>);

/// An error with a code of CUDA becomes a [`DeviceError`], which names the device of this thread.
impl<E: Failure> From<E> for Error {
    fn from(e: E) -> Self {
        match DeviceError::parse(&e.to_string()) {
            Some(fault) => Self(Box::new(fault)),
            None => Self(Box::new(e)),
        }
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
    /// The exit code of the process after this error.
    pub fn exit_code(&self) -> ExitCode {
        self.0.exit_code()
    }

    /// Downcasts to a module's error type.
    pub fn of<E: Failure>(&self) -> Option<&E> {
        let e: &(dyn std::error::Error + 'static) = &*self.0;
        e.downcast_ref()
    }
}

/// A failed tensor operation is a bug in `ft`, unless the device is out of memory.
#[cfg(feature = "candle")]
impl Failure for candle_core::Error {
    fn exit_code(&self) -> ExitCode {
        let text = self.to_string();
        match DeviceError::parse(&text) {
            Some(fault) => fault.exit_code(),
            None if text.to_lowercase().contains("out of memory") => ExitCode::DoesNotFit,
            None => ExitCode::Internal,
        }
    }
}

/// A position in a text file, shown as `recipe.toml:12:5`.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Location {
    /// Path of the file, or another name of the source ("command line").
    pub file: String,
    /// Line, 1-based; 0 if unknown.
    pub line: usize,
    /// Column in characters, 1-based; 0 if unknown.
    pub column: usize,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.line, self.column) {
            (0, _) => f.write_str(&self.file),
            (line, 0) => write!(f, "{}:{line}", self.file),
            (line, column) => write!(f, "{}:{line}:{column}", self.file),
        }
    }
}

/// A result with the library's error type.
pub type Result<T, E = Error> = std::result::Result<T, E>;
