//! Cached hashes, one file each in the cache folder.

use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::stat::Stat;
use crate::store::cache::sweep_oldest;
use crate::store::write::write_atomic;

/// Smaller files are not cached, because hashing is faster than a lookup.
pub(super) const LEAST: u64 = 4 << 20;
/// Maximum number of cached hashes; the oldest are removed.
const KEPT: usize = 1024;

/// A cache entry.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct CacheEntry {
    path: PathBuf,
    stat: Stat,
    blake3: String,
    /// Checksum of the other fields, so that a damaged entry is not used.
    check: String,
}

impl CacheEntry {
    pub(super) fn checked(path: &Path, stat: &Stat, blake3: &str) -> CacheEntry {
        let mut h = blake3::Hasher::new();
        h.update(path.as_os_str().as_bytes())
            .update(format!("{stat:?}").as_bytes())
            .update(blake3.as_bytes());
        let check = h.finalize().to_hex().to_string();
        CacheEntry { path: path.to_path_buf(), stat: stat.clone(), blake3: blake3.to_string(), check }
    }
}

/// Location of the cache entry of a file.
pub(super) struct CacheSlot {
    folder: PathBuf,
    /// Canonical path of the file.
    real: PathBuf,
}

impl CacheSlot {
    /// `None` for files not cached: small files, and paths that are not UTF-8.
    pub(super) fn of(folder: Option<PathBuf>, path: &Path, stat: &Stat) -> Option<CacheSlot> {
        let real = path.canonicalize().ok().filter(|p| stat.size >= LEAST && p.to_str().is_some())?;
        Some(CacheSlot { folder: folder?.join("hashes"), real })
    }

    fn file(&self) -> PathBuf {
        let name = blake3::hash(self.real.as_os_str().as_bytes()).to_hex();
        self.folder.join(&name.as_str()[..32])
    }

    /// The cached hash, if valid for the current state of the file.
    pub(super) fn get(&self, stat: &Stat) -> Option<String> {
        let mut bytes = Vec::new();
        File::open(self.file()).ok()?.take(1 << 16).read_to_end(&mut bytes).ok()?;
        let found: CacheEntry = serde_json::from_slice(&bytes).ok()?;
        let sound = found.check == CacheEntry::checked(&found.path, &found.stat, &found.blake3).check;
        (sound && found.path == self.real && found.stat == *stat).then_some(found.blake3)
    }

    /// Stores a hash. Best effort: without a writable cache folder, the next command hashes again.
    pub(super) fn put(&self, stat: &Stat, blake3: &str) {
        let bytes = serde_json::to_vec(&CacheEntry::checked(&self.real, stat, blake3)).unwrap_or_default();
        if write_atomic(&self.file(), &bytes).is_ok() {
            sweep_oldest(&self.folder, KEPT);
        }
    }
}
