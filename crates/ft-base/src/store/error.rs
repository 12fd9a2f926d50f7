//! Errors of file access.

use std::io;
use std::path::{Path, PathBuf};

use super::disk::{free_bytes, human_bytes};
use crate::error::{ExitCode, Failure};

/// A problem with a file of tensors, a checkpoint or a run folder.
///
/// Messages name the file (and the tensor), and the next step to take.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder cannot be opened or read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// A file in a run folder cannot be read. Unlike [`Error::Read`], a storage error rather than a
    /// model error.
    #[error("cannot read {}: {source}{}", path.display(), run_hint(source))]
    Run {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// A file or folder cannot be written, synced, renamed or removed.
    #[error("cannot {doing} {}: {source}{}", path.display(), write_hint(source, *needed, *free))]
    Write {
        /// The failed operation, as a verb: "write", "sync", "rename to".
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Total bytes of the file or set of files, if known.
        needed: Option<u64>,
        /// Free bytes on the disk right after the failure, if known.
        free: Option<u64>,
        /// The I/O error.
        source: io::Error,
    },
    /// The disk would be full before the files are complete. Nothing was written.
    #[error(
        "{} needs {} and its disk has {} free; free some space, or choose another folder",
        path.display(), human_bytes(*needed), human_bytes(*free)
    )]
    DiskFull {
        /// Destination.
        path: PathBuf,
        /// Bytes required.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// A folder without readable weights.
    #[error("no weights in {}: expected model.safetensors or model.safetensors.index.json{hint}", dir.display())]
    NoWeights {
        /// The folder.
        dir: PathBuf,
        /// Description of other files found, and advice; empty, or starting with a separator.
        hint: String,
    },
    /// A pickle file. Never opened, since unpickling can run arbitrary code.
    #[error(
        "{} is a PyTorch pickle file, which can run code when it is read, so ft never reads one\n\
         hint: convert it to safetensors first: in Python, save_pretrained(DIR, safe_serialization=True)",
        path.display()
    )]
    Pickle {
        /// The file.
        path: PathBuf,
    },
    /// A file of another type with a safetensors name.
    #[error("{} is not a safetensors file but {kind}\nhint: {hint}", path.display())]
    OtherKind {
        /// The file.
        path: PathBuf,
        /// Detected type.
        kind: &'static str,
        /// How to get the real file.
        hint: &'static str,
    },
    /// A safetensors file with an inconsistent header.
    #[error("{}: {problem}; the file is damaged or incomplete: fetch it again", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Description, with the tensor name.
        problem: String,
    },
    /// An inconsistent shard index, or one that does not match the shards.
    #[error("{}: {problem}", path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// Description, with the tensor name.
        problem: String,
    },
    /// A file name that leads out of the folder, or to something other than a plain file.
    #[error("refusing to open {name:?} in {}: {why}", dir.display())]
    Unsafe {
        /// The folder.
        dir: PathBuf,
        /// The rejected name.
        name: String,
        /// The violated rule.
        why: String,
    },
    /// A missing tensor.
    #[error("no tensor {name:?} in {}{}", path.display(), nearest.as_ref().map(|n| format!("; the \
        nearest name is {n:?}")).unwrap_or_default())]
    NoTensor {
        /// The folder or file.
        path: PathBuf,
        /// The requested name.
        name: String,
        /// The most similar existing name.
        nearest: Option<String>,
    },
    /// A file was truncated after it was opened.
    #[error("{} was cut short while tensor {name:?} was read: another program changed it", path.display())]
    CutShort {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A range of rows, elements or bytes outside of a tensor.
    #[error("rows {start}..{end} of tensor {name:?} with shape {shape:?} do not exist")]
    Rows {
        /// The tensor.
        name: String,
        /// Start of the requested range.
        start: usize,
        /// End of the requested range.
        end: usize,
        /// Shape of the tensor.
        shape: Vec<usize>,
    },
    /// A NaN or infinite value in a tensor read for computation.
    #[error(
        "{}: tensor {name:?} has a value that is not finite as {dtype}, at {at:?}\nhint: the file is \
        damaged, or its model has \
         diverged: fetch it again, or use another one",
        path.display()
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The requested dtype.
        dtype: String,
        /// Index of the first such value found.
        at: Vec<usize>,
    },
    /// A stored dtype that cannot be converted to the requested one.
    #[error(
        "{}: tensor {name:?} is {from} and cannot be read as {to}\nhint: weights are read from F32, F16, BF16 and F64",
        path.display()
    )]
    Unread {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Dtype in the file.
        from: String,
        /// Requested dtype.
        to: String,
    },
    /// A dtype not supported by the output format.
    #[error("tensor {name:?} is {from} and cannot be written as {to}")]
    Convert {
        /// The tensor.
        name: String,
        /// Dtype of the tensor.
        from: String,
        /// Description of the output format.
        to: String,
    },
    /// A tensor that does not match the declared dtype and shape of the file being written.
    #[error("tensor {name:?} was announced as {announced} and came as {came}")]
    Announced {
        /// The tensor.
        name: String,
        /// Declared dtype and shape.
        announced: String,
        /// Actual dtype and shape.
        came: String,
    },
    /// Duplicate tensor name in a file being written.
    #[error("tensor {name:?} is given twice for {}", path.display())]
    Twice {
        /// The file or folder.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// candle failed to build or move a tensor.
    #[error("tensor {name:?}: {source}")]
    Tensor {
        /// The tensor.
        name: String,
        /// The candle error.
        source: crate::Error,
    },
    /// Checkpoints exist, but all are damaged.
    #[error(
        "no whole checkpoint in {}:\n  {}\nhint: restore one from a backup, or start again with --overwrite",
        dir.display(), damage.join("\n  ")
    )]
    AllDamaged {
        /// The folder of checkpoints.
        dir: PathBuf,
        /// Damage of each checkpoint.
        damage: Vec<String>,
    },
    /// No checkpoint of the requested step.
    #[error("no checkpoint of step {step} in {}{}", dir.display(), there(steps))]
    NoCheckpoint {
        /// The folder of checkpoints.
        dir: PathBuf,
        /// The requested step.
        step: u64,
        /// Steps with a checkpoint.
        steps: Vec<u64>,
    },
    /// A checkpoint that fails verification.
    #[error("checkpoint {} is damaged: {problem}", path.display())]
    Damaged {
        /// The checkpoint's folder.
        path: PathBuf,
        /// Description, with the file name.
        problem: String,
    },
    /// The output folder is not empty, or is a file.
    #[error("{}: is there already, and is no empty folder\nhint: {hint}", dir.display())]
    Occupied {
        /// The folder.
        dir: PathBuf,
        /// Advice.
        hint: &'static str,
    },
    /// A path that cannot be replaced by a new folder: without a file name, the working directory, or a
    /// mount point.
    #[error("{}: a folder cannot be written there\nhint: name a new folder, or one that is neither \
        the working directory nor a mount", dir.display())]
    Name {
        /// The path.
        dir: PathBuf,
    },
    /// A file that changed during reading, or exceeds the size limit.
    #[error("{}: {problem}", path.display())]
    Changed {
        /// The file or folder.
        path: PathBuf,
        /// Description.
        problem: String,
    },
    /// The folder is locked by another process.
    #[error("another ft process{} is using {}; wait for it, or choose another folder",
         holder.as_ref().map(|h| format!(" ({h})")).unwrap_or_default(), dir.display())]
    Locked {
        /// The folder.
        dir: PathBuf,
        /// Contents of the lock file: "process PID".
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

/// Lists the existing checkpoints as a hint.
fn there(steps: &[u64]) -> String {
    let list: Vec<String> = steps.iter().map(u64::to_string).collect();
    if list.is_empty() { String::new() } else { format!("\nhint: there are those of {}", list.join(", ")) }
}

impl Error {
    /// A read error of `path`.
    pub fn read(path: &Path, source: io::Error) -> Error {
        Error::Read { path: path.to_path_buf(), source }
    }

    /// A read error of a file in a run folder.
    pub fn run(path: &Path, source: io::Error) -> Error {
        Error::Run { path: path.to_path_buf(), source }
    }

    /// A write error of `path`. Queries the free disk space if the disk is full.
    pub fn write(doing: &'static str, path: &Path, source: io::Error) -> Error {
        Error::write_sized(doing, path, None, source)
    }

    /// Like [`Error::write`], where `needed` bytes were to be written.
    pub fn write_sized(doing: &'static str, path: &Path, needed: Option<u64>, source: io::Error) -> Error {
        let free = match source.kind() {
            io::ErrorKind::StorageFull => path.parent().and_then(free_bytes),
            _ => None,
        };
        Error::Write { doing, path: path.to_path_buf(), needed, free, source }
    }
}

/// Whether an error indicates a failing disk rather than a bad file.
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
            "\nhint: free some space, or choose another folder (of a run: run.output, and a lower run.keep)"
        }
        io::ErrorKind::FileTooLarge => {
            "\nhint: a limit on the size of files is in force (ulimit -f); raise it"
        }
        io::ErrorKind::ResourceBusy | io::ErrorKind::CrossesDevices => {
            "\nhint: if a disk is mounted there, name a folder on it"
        }
        io::ErrorKind::Unsupported => {
            "\nhint: the file system may have no locks (Lustre: mount it with -o flock); choose a folder on another one"
        }
        io::ErrorKind::ReadOnlyFilesystem => "\nhint: the disk is mounted read-only; choose another folder",
        io::ErrorKind::PermissionDenied => {
            "\nhint: this user may not write there; choose another folder or change its permissions"
        }
        _ => "",
    });
    text
}
