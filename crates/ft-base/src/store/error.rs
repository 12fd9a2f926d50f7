//! What can go wrong with bytes on disk.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::{ExitCode, Failure};

/// A problem with a file of tensors, a checkpoint or a run folder.
///
/// Each message names the file (and the tensor), and what to do next.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder that could not be opened or read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file of a run folder that could not be read: what a run wrote is storage, and no model's.
    #[error("cannot read {}: {source}{}", path.display(), run_hint(source))]
    Run {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file or folder that could not be written, synced, renamed or removed.
    #[error("cannot {doing} {}: {source}{}", path.display(), write_hint(source, *needed, *free))]
    Write {
        /// The step that failed, as a verb: "write", "sync", "rename".
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Bytes that the whole file (or set of files) takes, when known.
        needed: Option<u64>,
        /// Bytes that were free on that disk just after the failure, when known.
        free: Option<u64>,
        /// What the system said.
        source: io::Error,
    },
    /// A disk that would be full before the files are complete; nothing was written.
    #[error(
        "{} needs {} and its disk has {} free; free some space, or choose another folder",
        path.display(), human_bytes(*needed), human_bytes(*free)
    )]
    DiskFull {
        /// Where the files would go.
        path: PathBuf,
        /// Bytes that they take.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// A folder without weights that can be read.
    #[error("no weights in {}: expected model.safetensors or model.safetensors.index.json{hint}", dir.display())]
    NoWeights {
        /// The folder.
        dir: PathBuf,
        /// What is there instead, and what to do; empty, or starts with a separator.
        hint: String,
    },
    /// A pickle file: reading one runs code, so it is never opened.
    #[error(
        "{} is a PyTorch pickle file, which can run code when it is read, so ft never reads one\n\
         hint: convert it to safetensors first: in Python, save_pretrained(DIR, safe_serialization=True)",
        path.display()
    )]
    Pickle {
        /// The file.
        path: PathBuf,
    },
    /// Another kind of file under a safetensors name.
    #[error("{} is not a safetensors file but {kind}\nhint: {hint}", path.display())]
    OtherKind {
        /// The file.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
        /// How to get the real one.
        hint: &'static str,
    },
    /// A safetensors file whose header does not hold together.
    #[error("{}: {problem}; the file is damaged or incomplete: fetch it again", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the tensor's name.
        problem: String,
    },
    /// A shard index that does not hold together, or does not fit its shards.
    #[error("{}: {problem}", path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong, with the tensor's name.
        problem: String,
    },
    /// A file name that leads out of its folder, or to something that is not a plain file.
    #[error("refusing to open {name:?} in {}: {why}", dir.display())]
    Unsafe {
        /// The folder that the name must stay in.
        dir: PathBuf,
        /// The name, as it was given.
        name: String,
        /// Which rule it breaks.
        why: String,
    },
    /// A tensor that was asked for and is not there.
    #[error("no tensor {name:?} in {}{}", path.display(), nearest.as_ref().map(|n| format!("; the nearest name is {n:?}")).unwrap_or_default())]
    NoTensor {
        /// The folder or file.
        path: PathBuf,
        /// The name that was asked for.
        name: String,
        /// The nearest name that exists.
        nearest: Option<String>,
    },
    /// A file that got shorter after it was opened.
    #[error("{} was cut short while tensor {name:?} was read: another program changed it", path.display())]
    CutShort {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// Rows that a tensor does not have.
    #[error("rows {start}..{end} of tensor {name:?} with shape {shape:?} do not exist")]
    Rows {
        /// The tensor.
        name: String,
        /// First row asked for.
        start: usize,
        /// End of the rows asked for.
        end: usize,
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// A value that is NaN or infinite, where numbers are read to compute with.
    #[error(
        "{}: tensor {name:?} has a value that is not finite as {dtype}, at {at:?}\nhint: the file is damaged, or its model has \
         diverged: fetch it again, or use another one",
        path.display()
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What it was to be read as.
        dtype: String,
        /// Place of the first that was found.
        at: Vec<usize>,
    },
    /// A tensor of a number format that is not read as what is wanted.
    #[error(
        "{}: tensor {name:?} is {from} and cannot be read as {to}\nhint: weights are read from F32, F16, BF16 and F64",
        path.display()
    )]
    Unread {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The format in the file.
        from: String,
        /// The format asked for.
        to: String,
    },
    /// A number format that a file that is written does not have.
    #[error("tensor {name:?} is {from} and cannot be written as {to}")]
    Convert {
        /// The tensor.
        name: String,
        /// Its format.
        from: String,
        /// The format of the file.
        to: String,
    },
    /// A tensor that differs from what was announced for the file being written.
    #[error("tensor {name:?} was announced as {announced} and came as {came}")]
    Announced {
        /// The tensor.
        name: String,
        /// Format and shape in the header.
        announced: String,
        /// Format and shape of the tensor.
        came: String,
    },
    /// Two tensors of one name in a file being written.
    #[error("tensor {name:?} is given twice for {}", path.display())]
    Twice {
        /// The file or folder.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// candle could not build or move a tensor.
    #[error("tensor {name:?}: {source}")]
    Tensor {
        /// The tensor.
        name: String,
        /// Cause.
        source: crate::Error,
    },
    /// Checkpoints are there, and not one of them is whole.
    #[error(
        "no whole checkpoint in {}:\n  {}\nhint: restore one from a backup, or start again with --overwrite",
        dir.display(), damage.join("\n  ")
    )]
    AllDamaged {
        /// The folder of checkpoints.
        dir: PathBuf,
        /// What is wrong with each.
        damage: Vec<String>,
    },
    /// No checkpoint of the step that was asked for.
    #[error("no checkpoint of step {step} in {}{}", dir.display(), there(steps))]
    NoCheckpoint {
        /// The folder of checkpoints.
        dir: PathBuf,
        /// The step.
        step: u64,
        /// The steps that have one.
        steps: Vec<u64>,
    },
    /// A checkpoint that is not what was written.
    #[error("checkpoint {} is damaged: {problem}", path.display())]
    Damaged {
        /// The checkpoint's folder.
        path: PathBuf,
        /// What is wrong, with the file's name.
        problem: String,
    },
    /// A folder to be written that has something in it.
    #[error("{}: is not empty\n  hint: {hint}", dir.display())]
    Occupied {
        /// The folder.
        dir: PathBuf,
        /// What to do.
        hint: &'static str,
    },
    /// A folder to be written that has no name of its own.
    #[error("{}: a folder cannot be written there\n  hint: name a new folder, or one that is neither the working directory nor a mount", dir.display())]
    Name {
        /// The path.
        dir: PathBuf,
    },
    /// A folder of ours that is not what was written.
    #[error("{}: {problem}", path.display())]
    Changed {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Another process works on the folder.
    #[error("another ft process{} is using {}; wait for it, or choose another folder", holder.as_ref().map(|h| format!(" ({h})")).unwrap_or_default(), dir.display())]
    Locked {
        /// The folder.
        dir: PathBuf,
        /// The process, as it wrote itself down.
        holder: Option<String>,
    },
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::Read { source, .. } if is_disk_failure(source) => ExitCode::Storage,
            Error::Read { .. }
            | Error::NoWeights { .. }
            | Error::Pickle { .. }
            | Error::OtherKind { .. }
            | Error::Header { .. }
            | Error::Index { .. }
            | Error::Unsafe { .. }
            | Error::NoTensor { .. }
            | Error::CutShort { .. }
            | Error::Changed { .. }
            | Error::Rows { .. }
            | Error::NotFinite { .. }
            | Error::Unread { .. }
            | Error::Convert { .. } => ExitCode::Model,
            Error::Run { .. }
            | Error::Write { .. }
            | Error::DiskFull { .. }
            | Error::AllDamaged { .. }
            | Error::NoCheckpoint { .. }
            | Error::Damaged { .. }
            | Error::Locked { .. } => ExitCode::Storage,
            Error::Occupied { .. } | Error::Name { .. } => ExitCode::Usage,
            Error::Announced { .. } | Error::Twice { .. } => ExitCode::Internal,
            Error::Tensor { source, .. } => source.exit_code(),
        }
    }
}

/// The steps that have a checkpoint, as a hint.
fn there(steps: &[u64]) -> String {
    let list: Vec<String> = steps.iter().map(u64::to_string).collect();
    if list.is_empty() { String::new() } else { format!("\nhint: there are those of {}", list.join(", ")) }
}

impl Error {
    /// A read error of `path`.
    pub fn read(path: &Path, source: io::Error) -> Error {
        Error::Read { path: path.to_path_buf(), source }
    }

    /// A read error of a run folder's file.
    pub fn run(path: &Path, source: io::Error) -> Error {
        Error::Run { path: path.to_path_buf(), source }
    }

    /// A write error of `path`; asks the disk how much is free when it is full.
    pub fn write(doing: &'static str, path: &Path, needed: Option<u64>, source: io::Error) -> Error {
        let free = match source.kind() {
            io::ErrorKind::StorageFull => path.parent().and_then(super::atomic::free_bytes),
            _ => None,
        };
        Error::Write { doing, path: path.to_path_buf(), needed, free, source }
    }
}

/// Errors that speak of a broken disk and not of a wrong file.
fn is_disk_failure(e: &io::Error) -> bool {
    e.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
}

fn run_hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::InvalidInput => "\nhint: move it out of the run folder; --resume goes on without it",
        _ => "",
    }
}

fn write_hint(source: &io::Error, needed: Option<u64>, free: Option<u64>) -> String {
    let mut text = match (needed, free) {
        (Some(n), Some(f)) => format!(" (it needs {}, {} is free)", human_bytes(n), human_bytes(f)),
        (Some(n), None) => format!(" (it needs {})", human_bytes(n)),
        (None, _) => String::new(),
    };
    text.push_str(match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "\nhint: free some space, lower run.keep, or choose another run.output"
        }
        io::ErrorKind::FileTooLarge => {
            "\nhint: a limit on the size of files is in force (ulimit -f); raise it"
        }
        io::ErrorKind::ResourceBusy | io::ErrorKind::CrossesDevices => {
            "\nhint: if a disk is mounted there, name a folder on it"
        }
        io::ErrorKind::ReadOnlyFilesystem => "\nhint: the disk is mounted read-only; choose another folder",
        io::ErrorKind::PermissionDenied => {
            "\nhint: this user may not write there; choose another folder or change its permissions"
        }
        _ => "",
    });
    text
}

/// Bytes for people: `12.3 GiB`; exact below 1 KiB.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} bytes");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}
