//! Folders that are whole or absent: a run's result, a merged or quantized model, an export, the 4-bit cache.
//!
//! ```text
//! NAME/            what readers see: the old folder, or the new one, never a mix
//! .ft-NAME.tmp/    beside it while somebody writes NAME
//!          .lock   of the process that does
//!          new/    being filled; then checked, made durable, and renamed to NAME
//!          keep    names of files in the old NAME that are not ours: they move into the new one
//!          old/    the old NAME, where the file system cannot exchange two folders in one step
//! ```
//!
//! Where NAME is replaced, `new` and NAME are exchanged (`RENAME_EXCHANGE`), so that at no moment there is none; else
//! the old one is set aside, which the next start undoes if the process is killed right then. A process that fails
//! removes its `.ft-NAME.tmp`; one that is killed leaves it unlocked, and the next one that writes into the same
//! parent settles and removes it.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Error;
use super::atomic::{TEMPORARY, folder_of, sync_folder, write_atomic};
use super::fault::fault;
use super::lock::{LOCK, Lock, make_folders, remove_created};
use super::path::read_inside;

const NEW: &str = "new";
const OLD: &str = "old";
const KEEP: &str = "keep";

/// Bytes of the list of names that move; far above what a folder has.
const MOST_NAMES: u64 = 64 << 20;

/// How often, and after what time, a lock is tried again before it counts as held: somebody who only sweeps has it for
/// a moment.
const TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_millis(30);

/// A folder being written, not yet visible under its name. Dropping it removes what was written.
#[derive(Debug)]
pub struct NewFolder {
    target: PathBuf,
    /// What to call the target in messages.
    named: PathBuf,
    workspace: Workspace,
    /// Folders above the target that were not there before.
    created: Vec<PathBuf>,
}

impl NewFolder {
    /// Starts the folder `target`; nothing is there, or seen to be there, until it is committed. Removes what killed
    /// processes left half-written in the parent.
    ///
    /// # Errors
    /// [`Error::Locked`] when another process is writing that folder; [`Error::Name`] for a path that is no name of a
    /// folder; [`Error::Write`].
    pub fn begin(target: &Path) -> Result<NewFolder, Error> {
        for _ in 0..TRIES {
            match NewFolder::try_begin(target, target) {
                Err(Error::Locked { .. }) => std::thread::sleep(PAUSE),
                other => return other,
            }
        }
        NewFolder::try_begin(target, target)
    }

    /// As [`NewFolder::begin`], for a folder that the user named: where that is a link to one, the folder is meant. It
    /// cannot be the working directory.
    ///
    /// # Errors
    /// As [`NewFolder::begin`].
    pub fn begin_named(named: &Path) -> Result<NewFolder, Error> {
        let mut begun = NewFolder::begin(&real(named)?)?;
        begun.named = named.to_path_buf();
        Ok(begun)
    }

    /// As [`NewFolder::begin_named`], after other processes that are writing that folder are done; `told` hears once
    /// that it waits, and for whom.
    ///
    /// # Errors
    /// As [`NewFolder::begin`].
    pub fn begin_in_turn(named: &Path, told: &dyn Fn(Option<&str>)) -> Result<NewFolder, Error> {
        let mut tried = 0;
        loop {
            match NewFolder::try_begin(&real(named)?, named) {
                Err(Error::Locked { holder, .. }) => {
                    tried += 1;
                    if tried == TRIES {
                        told(holder.as_deref());
                    }
                    std::thread::sleep(PAUSE);
                }
                other => return other,
            }
        }
    }

    /// Removes what killed processes left beside a folder that needs no writing. Best effort.
    pub fn sweep_beside(target: &Path) {
        let real = target.canonicalize();
        sweep(folder_of(real.as_deref().unwrap_or(target)), None);
    }

    fn try_begin(target: &Path, named: &Path) -> Result<NewFolder, Error> {
        let name = target.file_name().map(OsStr::to_os_string).ok_or_else(|| no_name(named))?;
        let parent = folder_of(target);
        let mut created = Vec::new();
        let begun = make_folders(parent, &mut created)
            .and_then(|()| Workspace::take(parent, &name))
            .and_then(|workspace| {
                workspace.settle(target)?;
                let new = workspace.draft();
                std::fs::create_dir(&new).map_err(|e| Error::write("create", &new, None, e))?;
                Ok(workspace)
            });
        let workspace = begun.inspect_err(|_| remove_created(&created))?;
        sweep(parent, Some(&name));
        fault!("folder.begun");
        let (target, named) = (target.to_path_buf(), named.to_path_buf());
        Ok(NewFolder { target, named, workspace, created })
    }

    /// The folder to write files into.
    pub fn path(&self) -> PathBuf {
        self.workspace.draft()
    }

    /// The name that it will have, as it was given.
    pub fn named(&self) -> &Path {
        &self.named
    }

    /// Refuses a target that has something in it; `hint` says what to do.
    ///
    /// # Errors
    /// [`Error::Occupied`].
    pub fn refuse_occupied(&self, hint: &'static str) -> Result<(), Error> {
        match state(&self.target)? {
            State::Absent | State::Empty => Ok(()),
            State::Occupied => Err(Error::Occupied { dir: self.named.clone(), hint }),
        }
    }

    /// Makes the files durable and gives the folder its name, which is free or that of an empty folder.
    ///
    /// # Errors
    /// [`Error::Occupied`] when something came there meanwhile; [`Error::Write`].
    pub fn commit(self) -> Result<(), Error> {
        self.give_name(None)
    }

    /// As [`NewFolder::commit`], in the place of what is there. Of that, files for which `ours` is false move into the
    /// new folder; so does every folder.
    ///
    /// # Errors
    /// [`Error::Write`]; then the old folder is as it was.
    pub fn replace(self, ours: &dyn Fn(&str) -> bool) -> Result<(), Error> {
        self.give_name(Some(ours))
    }

    fn give_name(mut self, ours: Option<&dyn Fn(&str) -> bool>) -> Result<(), Error> {
        let (new, target) = (self.workspace.draft(), &self.target);
        fault!("folder.filled");
        if let Ok(old) = target.symlink_metadata()
            && old.is_dir()
            && old.permissions().mode() & 0o200 != 0
        {
            // Whoever made that folder wants this mode.
            let _ = std::fs::set_permissions(&new, old.permissions());
        }
        sync_tree(&new)?;
        fault!("folder.synced");
        match (state(target)?, ours) {
            (State::Occupied, Some(ours)) => {
                self.workspace.keep(target, ours)?;
                swap(&new, target, &self.workspace.old())?;
            }
            (State::Occupied, None) => {
                return Err(Error::Occupied { dir: self.named.clone(), hint: "another folder" });
            }
            _ => {
                // Fails on a folder that is not empty any more.
                rename(&new, target)?;
                fault!("folder.renamed");
            }
        }
        // From here on it is there: the folders above it stay, and what goes wrong is told, with nothing lost.
        self.created.clear();
        sync_folder(folder_of(target))?;
        fault!("folder.parent_synced");
        self.workspace.settle(target)
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // Best effort: the next start does the rest. The workspace removes itself after this.
        let _ = self.workspace.settle(&self.target);
        self.workspace.remove();
        remove_created(&self.created);
    }
}

/// `.ft-NAME.tmp`, locked.
#[derive(Debug)]
struct Workspace {
    dir: PathBuf,
    lock: Option<Lock>,
}

impl Workspace {
    fn take(parent: &Path, name: &OsStr) -> Result<Workspace, Error> {
        let mut file = OsString::from(TEMPORARY.0);
        file.push(name);
        file.push(TEMPORARY.1);
        let dir = parent.join(file);
        let lock = Lock::take(&dir, true).map_err(|e| match e {
            // The user knows the folder by its name.
            Error::Locked { holder, .. } => Error::Locked { dir: parent.join(name), holder },
            e => e,
        })?;
        Ok(Workspace { dir, lock: Some(lock) })
    }

    fn draft(&self) -> PathBuf {
        self.dir.join(NEW)
    }

    fn old(&self) -> PathBuf {
        self.dir.join(OLD)
    }

    /// Takes down which files of `target` are to move into the new folder, before there can be need to.
    fn keep(&self, target: &Path, ours: &dyn Fn(&str) -> bool) -> Result<(), Error> {
        let fail = |e| Error::write("list", target, None, e);
        let is_folder = target.symlink_metadata().map_err(fail)?.is_dir();
        let mut names = BTreeSet::new();
        // What a link leads to stays where it is: the link alone is replaced.
        let entries = is_folder.then(|| std::fs::read_dir(target)).transpose().map_err(fail)?;
        for entry in entries.into_iter().flatten() {
            let entry = entry.map_err(fail)?;
            let (name, kind) = (entry.file_name(), entry.file_type().map_err(fail)?);
            let is_ours = is_workspace(&name) || name.to_str().is_some_and(ours);
            if kind.is_dir() || !is_ours {
                names.insert(name);
            }
        }
        if names.is_empty() {
            return Ok(());
        }
        let mut bytes = Vec::new();
        for name in names {
            bytes.extend_from_slice(name.as_bytes());
            bytes.push(0);
        }
        write_atomic(&self.dir.join(KEEP), &bytes)?;
        fault!("folder.kept");
        Ok(())
    }

    /// Puts right what a replacement left, however far it came, and removes drafts. Afterwards the workspace has
    /// nothing but its lock.
    fn settle(&self, target: &Path) -> Result<(), Error> {
        let keeps = there(&self.dir.join(KEEP));
        let names = if keeps { read_inside(&self.dir, KEEP, MOST_NAMES)? } else { Vec::new() };
        let old = self.old();
        if there(&old) && !there(target) {
            rename(&old, target)?;
            sync_folder(folder_of(target))?;
        }
        for left in [old, self.draft()] {
            // The draft has none of these names, the old folder may: it depends on how far the exchange came. Names
            // alone, out of a folder that is no link: a workspace may be prepared by somebody else.
            let plain = |n: &&[u8]| !n.is_empty() && !n.contains(&b'/') && *n != b"." && *n != b"..";
            let mut moved = false;
            for name in names.split(|b| *b == 0).filter(plain).filter(|_| is_folder(&left)) {
                let name = OsString::from_vec(name.to_vec());
                let (from, to) = (left.join(&name), target.join(&name));
                if there(&from) && is_folder(target) && !there(&to) {
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

    /// Removes the workspace, if it was settled.
    fn remove(&mut self) {
        self.lock = None;
        // Not if anything is in it: it is another process's by now, or was not settled.
        let _ = std::fs::remove_dir(&self.dir);
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Whether a name is one that files and folders have while they are written.
pub(super) fn is_workspace(name: &OsStr) -> bool {
    target_of(name).is_some()
}

/// The name of the folder that a workspace of this name is for.
fn target_of(name: &OsStr) -> Option<OsString> {
    let (prefix, suffix) = TEMPORARY;
    let inner = name.as_bytes().strip_prefix(prefix.as_bytes())?.strip_suffix(suffix.as_bytes())?;
    (!inner.is_empty()).then(|| OsString::from_vec(inner.to_vec()))
}

/// Settles and removes the workspaces in a folder that killed processes left, but that of `own`. Best effort: what is
/// locked is being written, and what cannot be removed is in nobody's way.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Empty,
    Occupied,
}

/// What is under a name: a link or a file counts as something.
fn state(path: &Path) -> Result<State, Error> {
    match path.symlink_metadata() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(State::Absent),
        Err(e) => Err(Error::write("read", path, None, e)),
        Ok(m) if m.is_dir() => match std::fs::read_dir(path) {
            Ok(mut entries) => Ok(if entries.next().is_none() { State::Empty } else { State::Occupied }),
            Err(e) => Err(Error::write("list", path, None, e)),
        },
        Ok(_) => Ok(State::Occupied),
    }
}

/// Whether a name is taken; links are not followed.
fn there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

fn is_folder(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.is_dir())
}

/// The path of a folder without links, where it is there.
fn real(path: &Path) -> Result<PathBuf, Error> {
    let real = match path.canonicalize() {
        Ok(real) => real,
        Err(e) if e.kind() == io::ErrorKind::NotFound && !there(path) => return Ok(path.to_path_buf()),
        Err(e) => return Err(Error::write("use", path, None, e)),
    };
    // Its place would be taken by another folder: a shell would be left in one that is gone, and a mount stays.
    let here = std::env::current_dir().and_then(|d| d.canonicalize());
    let device = |p: &Path| p.metadata().map(|m| m.dev()).ok();
    let is_mount = real.is_dir() && device(&real) != real.parent().and_then(device);
    match is_mount || here.is_ok_and(|here| here.starts_with(&real)) {
        true => Err(no_name(path)),
        false => Ok(real),
    }
}

fn no_name(path: &Path) -> Error {
    Error::Name { dir: path.to_path_buf() }
}

/// Puts `new` in the place of `target`, which is there; what was there is then in `new`'s place, or in `old`'s.
fn swap(new: &Path, target: &Path, old: &Path) -> Result<(), Error> {
    if exchange(new, target)? {
        fault!("folder.exchanged");
        return Ok(());
    }
    rename(target, old)?;
    fault!("folder.moved_aside");
    rename(new, target).inspect_err(|_| {
        // Settling would do it too; the sooner the better.
        let _ = std::fs::rename(old, target);
    })?;
    fault!("folder.replaced");
    Ok(())
}

/// Exchanges two names in one step; false where the file system cannot.
#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn exchange(a: &Path, b: &Path) -> Result<bool, Error> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use rustix::io::Errno;
    #[cfg(any(test, feature = "fault"))]
    if super::fault::without_exchange() {
        return Ok(false);
    }
    match renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(true),
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => Ok(false),
        Err(e) => Err(Error::write("replace", b, None, e.into())),
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn exchange(_: &Path, _: &Path) -> Result<bool, Error> {
    Ok(false)
}

fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    std::fs::rename(from, to).map_err(|e| Error::write("rename to", to, None, e))
}

/// Removes a file, a link or a whole folder, if it is there.
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

/// Makes everything below a folder durable.
fn sync_tree(dir: &Path) -> Result<(), Error> {
    for entry in std::fs::read_dir(dir).map_err(|e| Error::write("list", dir, None, e))? {
        let entry = entry.map_err(|e| Error::write("list", dir, None, e))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(|e| Error::write("read", &path, None, e))?;
        if kind.is_dir() {
            sync_tree(&path)?;
        } else if kind.is_file() {
            File::open(&path).and_then(|f| f.sync_all()).map_err(|e| Error::write("sync", &path, None, e))?;
        }
    }
    sync_folder(dir)
}

#[cfg(test)]
#[path = "folder_tests.rs"]
mod tests;
