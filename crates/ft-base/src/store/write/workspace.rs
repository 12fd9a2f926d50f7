//! The locked folder next to a target in which [`super::folder`] fills the new contents.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::atomic::{TEMPORARY, folder_of, removed, rename, sync_folder, write_atomic};
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

    /// Lists the entries of `target` to be moved into the new folder in `keep`, before any change; see
    /// [`list_foreign`]. Refuses those whose place in the new folder something of another kind has.
    pub(super) fn keep(&self, target: &Path, ours: &dyn Fn(&str) -> bool) -> Result<(), Error> {
        let mut names = BTreeSet::new();
        // If `target` is a link, only the link is replaced, and the contents stay in place.
        if target.symlink_metadata().map_err(|e| Error::write("list", target, e))?.is_dir() {
            list_foreign(target, OsStr::new(""), ours, &mut names)?;
        }
        if names.is_empty() {
            return Ok(());
        }
        if let Some(name) = names.iter().find(|name| self.has_other_kind(target, Path::new(name))) {
            let why = "a file or folder of the same name is to be there; move yours away";
            return Err(Error::write("replace", &target.join(name), io::Error::other(why)));
        }
        let bytes: Vec<u8> = names.iter().flat_map(|n| [n.as_bytes(), b"\0"].concat()).collect();
        write_atomic(&self.dir.join(KEEP), &bytes)?;
        fault!("folder.kept");
        Ok(())
    }

    /// Whether the draft has a file in the place of a folder of `target`, or the other way around: an entry, `name` or
    /// `folder/name`, could not be moved.
    fn has_other_kind(&self, target: &Path, name: &Path) -> bool {
        name.ancestors().filter(|part| !part.as_os_str().is_empty()).any(|part| {
            let new = self.draft().join(part);
            exists(&new) && is_folder(&new) != is_folder(&target.join(part))
        })
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
            // Depending on the progress of the exchange, the listed files are in `old` or in `new`.
            let mut changed = BTreeSet::new();
            for name in names.split(|b| *b == 0) {
                if let Some(folder) = move_over(&left, target, name)? {
                    fault!("folder.moved_over");
                    changed.extend([folder, target.to_path_buf()]);
                }
            }
            for folder in &changed {
                sync_folder(folder)?;
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

/// Lists the entries of a folder except unfinished files and those for which `ours` is true, which is asked with a `/`
/// after the name of a folder. Of a folder of ours, entries that are not ours are listed as `folder/name`.
fn list_foreign(
    dir: &Path,
    prefix: &OsStr,
    ours: &dyn Fn(&str) -> bool,
    names: &mut BTreeSet<OsString>,
) -> Result<(), Error> {
    let fail = |e| Error::write("list", dir, e);
    for entry in std::fs::read_dir(dir).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let mut name = prefix.to_os_string();
        name.push(entry.file_name());
        if !entry.file_type().map_err(fail)?.is_dir() {
            if !is_workspace(&entry.file_name()) && !name.to_str().is_some_and(ours) {
                names.insert(name);
            }
            continue;
        }
        let mut folder = name.clone();
        folder.push("/");
        if prefix.is_empty() && folder.to_str().is_some_and(ours) {
            list_foreign(&entry.path(), &folder, ours, names)?;
        } else {
            names.insert(name);
        }
    }
    Ok(())
}

/// Moves a listed entry, `name` or `folder/name`, from a folder to `target`, unless `target` has such an entry. Returns
/// the changed folder. Only plain names are accepted, in folders that are not links, since a malicious user may have
/// prepared the workspace.
fn move_over(left: &Path, target: &Path, name: &[u8]) -> Result<Option<PathBuf>, Error> {
    let plain = |n: &[u8]| !n.is_empty() && n != b"." && n != b"..";
    let parts = || name.split(|b| *b == b'/');
    let (from, to) = (left.join(OsStr::from_bytes(name)), target.join(OsStr::from_bytes(name)));
    let (source, folder) = (folder_of(&from), folder_of(&to));
    if !parts().all(plain) || parts().count() > 2 || ![left, source, target].into_iter().all(is_folder) {
        return Ok(None);
    }
    if !exists(&from) || exists(&to) {
        return Ok(None);
    }
    if !exists(folder) {
        std::fs::create_dir(folder).map_err(|e| Error::write("create", folder, e))?;
    }
    if !is_folder(folder) {
        return Ok(None);
    }
    rename(&from, &to)?;
    Ok(Some(folder.to_path_buf()))
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

/// Removes a file, link or folder, if it exists.
fn remove_all(path: &Path) -> Result<(), Error> {
    let remove = |m: Metadata| match m.is_dir() {
        true => std::fs::remove_dir_all(path),
        false => std::fs::remove_file(path),
    };
    removed(path, path.symlink_metadata().and_then(remove))
}
