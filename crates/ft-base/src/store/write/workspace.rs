//! The locked folder next to a target in which [`super::folder`] fills the new contents.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::atomic::{TEMPORARY, folder_of, sync_folder, write_atomic};
use super::lock::{LOCK, Lock};
use crate::store::Error;
use crate::store::fault::fault;
use crate::store::read::read_inside;

const NEW: &str = "new";
pub(super) const OLD: &str = "old";
pub(super) const KEEP: &str = "keep";

/// Size limit of `keep` in bytes, far above real lists of names.
const MOST_NAMES: u64 = 64 << 20;

/// The locked folder `.ft-NAME.tmp`.
#[derive(Debug)]
pub(super) struct Workspace {
    dir: PathBuf,
    lock: Option<Lock>,
}

impl Workspace {
    pub(super) fn take(parent: &Path, name: &OsStr) -> Result<Workspace, Error> {
        let mut file = OsString::from(TEMPORARY.0);
        file.push(name);
        file.push(TEMPORARY.1);
        let dir = parent.join(file);
        let lock = Lock::take(&dir, true).map_err(|e| match e {
            // Name the target in the message, not the workspace.
            Error::Locked { holder, .. } => Error::Locked { dir: parent.join(name), holder },
            e => e,
        })?;
        Ok(Workspace { dir, lock: Some(lock) })
    }

    pub(super) fn draft(&self) -> PathBuf {
        self.dir.join(NEW)
    }

    pub(super) fn old(&self) -> PathBuf {
        self.dir.join(OLD)
    }

    /// Lists the entries of `target` to be moved into the new folder in `keep`, before any change: all but
    /// unfinished files and those for which `ours` is true. Names of folders end in `/` there.
    pub(super) fn keep(&self, target: &Path, ours: &dyn Fn(&str) -> bool) -> Result<(), Error> {
        let fail = |e| Error::write("list", target, None, e);
        let is_folder = target.symlink_metadata().map_err(fail)?.is_dir();
        let mut names = BTreeSet::new();
        // If `target` is a link, only the link is replaced, and the contents stay in place.
        let entries = is_folder.then(|| std::fs::read_dir(target)).transpose().map_err(fail)?;
        for entry in entries.into_iter().flatten() {
            let entry = entry.map_err(fail)?;
            let (name, kind) = (entry.file_name(), entry.file_type().map_err(fail)?);
            let is_ours = if kind.is_dir() {
                name.to_str().is_some_and(|name| ours(&format!("{name}/")))
            } else {
                is_workspace(&name) || name.to_str().is_some_and(ours)
            };
            if !is_ours {
                names.insert(name);
            }
        }
        if names.is_empty() {
            return Ok(());
        }
        let bytes: Vec<u8> = names.iter().flat_map(|n| [n.as_bytes(), b"\0"].concat()).collect();
        write_atomic(&self.dir.join(KEEP), &bytes)?;
        fault!("folder.kept");
        Ok(())
    }

    /// Completes or reverts an interrupted replacement, and removes drafts. Afterwards the workspace
    /// contains only the lock.
    pub(super) fn settle(&self, target: &Path) -> Result<(), Error> {
        let keeps = exists(&self.dir.join(KEEP));
        let names = if keeps { read_inside(&self.dir, KEEP, MOST_NAMES)? } else { Vec::new() };
        let old = self.old();
        if exists(&old) && !exists(target) {
            rename(&old, target)?;
            sync_folder(folder_of(target))?;
        }
        for left in [old, self.draft()] {
            // Depending on the progress of the exchange, the listed files are in `old` or in `new`. Only
            // plain file names are accepted, from a folder that is not a link, since a malicious user
            // may have prepared the workspace.
            let plain = |n: &&[u8]| !n.is_empty() && !n.contains(&b'/') && *n != b"." && *n != b"..";
            let mut moved = false;
            for name in names.split(|b| *b == 0).filter(plain).filter(|_| is_folder(&left)) {
                let name = OsString::from_vec(name.to_vec());
                let (from, to) = (left.join(&name), target.join(&name));
                if exists(&from) && is_folder(target) && !exists(&to) {
                    rename(&from, &to)?;
                    moved = true;
                }
            }
            if moved {
                sync_folder(target)?;
                fault!("folder.moved_over");
            }
            remove_all(&left)?;
        }
        fault!("folder.settled");
        for entry in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            if entry.file_name() != LOCK {
                remove_all(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Removes the workspace, if settled.
    pub(super) fn remove(&mut self) {
        self.lock = None;
        // Fails unless empty, as intended: otherwise another process has taken it, or it was not settled.
        let _ = std::fs::remove_dir(&self.dir);
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Whether a name is used for unfinished files and folders.
pub(super) fn is_workspace(name: &OsStr) -> bool {
    target_of(name).is_some()
}

/// The target name for a workspace name.
fn target_of(name: &OsStr) -> Option<OsString> {
    let (prefix, suffix) = TEMPORARY;
    let inner = name.as_bytes().strip_prefix(prefix.as_bytes())?.strip_suffix(suffix.as_bytes())?;
    (!inner.is_empty()).then(|| OsString::from_vec(inner.to_vec()))
}

/// Settles and removes workspaces of killed processes in a folder, except the one for `own`. Best
/// effort: locked workspaces are in use, and remaining ones are harmless.
pub(super) fn sweep(parent: &Path, own: Option<&OsStr>) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let Some(name) = target_of(&entry.file_name()) else { continue };
        if own == Some(name.as_os_str()) || !entry.file_type().is_ok_and(|t| t.is_dir()) {
            continue;
        }
        let parts = [LOCK, NEW, OLD, KEEP].map(OsStr::new);
        let mut inside = std::fs::read_dir(entry.path()).into_iter().flatten().flatten();
        if inside.any(|e| !parts.contains(&e.file_name().as_os_str()) && !is_workspace(&e.file_name())) {
            continue;
        }
        if let Ok(workspace) = Workspace::take(parent, &name) {
            let _ = workspace.settle(&parent.join(&name));
        }
    }
}

/// Whether a path exists, without following links.
pub(super) fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

fn is_folder(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.is_dir())
}

pub(super) fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    std::fs::rename(from, to).map_err(|e| Error::write("rename to", to, None, e))
}

/// Removes a file, link or folder, if it exists.
fn remove_all(path: &Path) -> Result<(), Error> {
    let removed = match path.symlink_metadata() {
        Ok(m) if m.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(e) => Err(e),
    };
    match removed {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::write("remove", path, None, e)),
        _ => Ok(()),
    }
}
