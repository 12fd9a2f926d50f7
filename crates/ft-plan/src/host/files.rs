//! Files of a run, by disk.

use super::parts::{NamedBytes, sum};
use std::path::PathBuf;

/// A group of files written by a run.
#[derive(Clone, Debug, PartialEq)]
pub struct FileGroup {
    pub name: &'static str,
    /// Peak bytes on disk.
    pub bytes: u64,
    pub dir: PathBuf,
    /// Settings to change if they do not fit: recipe keys or environment variables.
    pub change: &'static [&'static str],
}

/// One disk, and the files of a run on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Disk {
    /// Folders on it.
    pub dirs: Vec<PathBuf>,
    /// Bytes by file group.
    pub parts: NamedBytes,
    /// Bytes available for writing, if known.
    pub free: Option<u64>,
    /// Settings to change if they do not fit.
    pub change: Vec<&'static str>,
}

impl Disk {
    /// Bytes required.
    pub fn needed(&self) -> u64 {
        sum(&self.parts)
    }

    /// Whether there is room; true if the free space is unknown.
    pub fn fits(&self) -> bool {
        self.free.is_none_or(|f| self.needed() <= f)
    }
}
