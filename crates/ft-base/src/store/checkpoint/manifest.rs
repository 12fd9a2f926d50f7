//! `manifest.json`: names, sizes and hashes of the files of a checkpoint.

use std::fs::File;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::store::Error;
use crate::store::fault::fault;
use crate::store::hash::whole;
use crate::store::read::{check_name, open_inside};
use crate::store::write::sync_folder;

/// The manifest's file name.
pub(super) const MANIFEST: &str = "manifest.json";
/// Name of the marker file of complete checkpoints.
pub(super) const MARKER: &str = "COMPLETE";

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    version: u32,
    step: u64,
    files: Vec<Entry>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// Path relative to the checkpoint, with `/` separators.
    name: String,
    bytes: u64,
    /// BLAKE3 hash, 64 hexadecimal digits.
    blake3: String,
}

impl Manifest {
    /// Syncs every file of a folder to disk, and records sizes and hashes.
    pub(super) fn of(dir: &Path, step: u64) -> Result<Manifest, Error> {
        let mut files = Vec::new();
        visit(dir, dir, &mut files)?;
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Manifest { version: 1, step, files })
    }

    /// Serializes the manifest, deterministically.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        format!("{:#}\n", serde_json::json!(self)).into_bytes()
    }

    /// Parses a manifest.
    pub(super) fn parse(bytes: &[u8]) -> Result<Manifest, String> {
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(|e| format!("{MANIFEST}: {e}"))?;
        match manifest.version {
            1 => Ok(manifest),
            v => Err(format!("{MANIFEST} has version {v}; this ft reads version 1")),
        }
    }

    /// The step of the checkpoint.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// Checks size and hash of every file.
    pub(super) fn check(&self, dir: &Path, step: u64) -> Result<(), String> {
        self.is_of(step)?;
        self.files.iter().try_for_each(|entry| entry.check(dir))
    }

    /// Like [`Manifest::check`], for one file.
    pub(super) fn check_file(&self, dir: &Path, step: u64, name: &str) -> Result<(), String> {
        self.is_of(step)?;
        let entry = self.files.iter().find(|f| f.name == name);
        entry.ok_or_else(|| format!("{MANIFEST} has no {name}"))?.check(dir)
    }

    fn is_of(&self, step: u64) -> Result<(), String> {
        if self.step == step { Ok(()) } else { Err(format!("{MANIFEST} is of step {}", self.step)) }
    }
}

impl Entry {
    fn check(&self, dir: &Path) -> Result<(), String> {
        let name = &self.name;
        let (file, path) = open_inside(dir, name).map_err(|e| e.to_string())?;
        let bytes = file.metadata().map_err(|e| Error::read(&path, e).to_string())?.len();
        if bytes != self.bytes {
            return Err(format!("{name} has {bytes} bytes and should have {}", self.bytes));
        }
        let hash = hash(&file).map_err(|e| Error::read(&path, e).to_string())?;
        if hash != self.blake3 {
            return Err(format!("{name} is not what was written (its hash differs)"));
        }
        Ok(())
    }
}

/// Syncs and hashes the contents of `dir`, and syncs `dir` itself.
fn visit(root: &Path, dir: &Path, files: &mut Vec<Entry>) -> Result<(), Error> {
    for entry in std::fs::read_dir(dir).map_err(|e| Error::write("list", dir, e))? {
        let path = entry.map_err(|e| Error::write("list", dir, e))?.path();
        let kind = path.symlink_metadata().map_err(|e| Error::write("read", &path, e))?.file_type();
        if kind.is_dir() {
            visit(root, &path, files)?;
            continue;
        }
        let name = path.strip_prefix(root).ok().and_then(Path::to_str).unwrap_or("");
        // Rejects files that could not be verified on reading.
        check_name(root, name)?;
        if !kind.is_file() || name == MANIFEST || name == MARKER {
            return Err(Error::Unsafe {
                dir: root.to_path_buf(),
                name: name.to_string(),
                why: "a checkpoint holds plain files, none named as its own two".to_string(),
            });
        }
        // Opened for writing as well, since some systems do not sync through a read-only descriptor.
        let file =
            File::options().read(true).write(true).open(&path).map_err(|e| Error::write("open", &path, e))?;
        file.sync_all().map_err(|e| Error::write("sync", &path, e))?;
        let bytes = file.metadata().map_err(|e| Error::write("read", &path, e))?.len();
        let blake3 = hash(&file).map_err(|e| Error::write("read", &path, e))?;
        files.push(Entry { name: name.to_string(), bytes, blake3 });
        fault!("commit.file_synced");
    }
    sync_folder(dir)
}

/// Hashes all bytes, without the hash cache.
fn hash(file: &File) -> std::io::Result<String> {
    Ok(whole(file)?.to_hex().to_string())
}
