//! Identity and version of a file.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::store::Error;

/// A file modified this recently may change again without a visible difference.
pub(super) const TICK: Duration = Duration::from_secs(2);

/// Identity and version of a file. Two equal values mean the same, unmodified file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    device: u64,
    inode: u64,
    pub(super) size: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stat {
    pub(super) fn of_file(file: &File, path: &Path) -> Result<Stat, Error> {
        file.metadata().map(|m| Stat::of(&m)).map_err(|e| Error::read(path, e))
    }

    /// From the metadata of a file.
    pub fn of(m: &Metadata) -> Stat {
        Stat {
            device: m.dev(),
            inode: m.ino(),
            size: m.len(),
            modified: (m.mtime(), m.mtime_nsec()),
            changed: (m.ctime(), m.ctime_nsec()),
        }
    }

    /// Whether a modification after `now` would change the time stamps.
    pub fn settled(&self, now: SystemTime) -> bool {
        let Some(since) = now.checked_sub(TICK).and_then(|t| t.duration_since(UNIX_EPOCH).ok()) else {
            return false;
        };
        let since = (since.as_secs() as i64, i64::from(since.subsec_nanos()));
        self.modified < since && self.changed < since
    }
}
