//! Folders written atomically: a run's result, a merged or quantized model, an export, the 4-bit cache.
//!
//! ```text
//! NAME/               seen by readers: either the old or the new folder, never a mix
//! .ft-NAME.tmp/       workspace next to it, while a process writes NAME
//!              .lock  held by this process
//!              new/   being filled; then synced to disk and renamed to NAME
//!              keep   names of foreign files in the old NAME, to be moved into the new one
//!              old/   the old NAME, on file systems without atomic exchange of folders
//! ```
//!
//! To replace NAME, `new` and NAME are exchanged (`RENAME_EXCHANGE`), so NAME exists at any time.
//! Without support for this, the old folder is set aside first; if the process is killed at this point,
//! the next start restores it. A failing process removes its `.ft-NAME.tmp`. A killed one leaves it
//! behind unlocked, and the next process to write into the same parent settles and removes it.

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

/// Size limit of `keep` in bytes, far above real lists of names.
const MOST_NAMES: u64 = 64 << 20;

/// Number of attempts to lock a workspace, and the pause between them. A sweep holds the lock only briefly.
const TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_millis(30);

/// A folder being written under a temporary name. Removed on drop unless committed.
#[derive(Debug)]
pub struct NewFolder {
    target: PathBuf,
    /// Name of the target in messages.
    named: PathBuf,
    workspace: Workspace,
    /// Newly created parents of the target.
    created: Vec<PathBuf>,
}

impl NewFolder {
    /// Starts the folder `target`, invisible until committed. Removes leftovers of killed processes in
    /// the parent.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process is writing the folder; [`Error::Name`] if the path has no
    /// file name; [`Error::Write`].
    pub fn begin(target: &Path) -> Result<NewFolder, Error> {
        for _ in 0..TRIES {
            match NewFolder::try_begin(target, target) {
                Err(Error::Locked { .. }) => std::thread::sleep(PAUSE),
                other => return other,
            }
        }
        NewFolder::try_begin(target, target)
    }

    /// Like [`NewFolder::begin`], for a path given by the user: a link to a folder stands for the
    /// folder. The working directory is not allowed.
    ///
    /// # Errors
    /// As [`NewFolder::begin`].
    pub fn begin_named(named: &Path) -> Result<NewFolder, Error> {
        let mut begun = NewFolder::begin(&real(named)?)?;
        begun.named = named.to_path_buf();
        Ok(begun)
    }

    /// Like [`NewFolder::begin_named`], but waits while another process writes the folder. Calls `told`
    /// once with the holder when waiting starts.
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

    /// Removes leftovers of killed processes next to a folder that is already complete. Best effort.
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

    /// The folder for the files.
    pub fn path(&self) -> PathBuf {
        self.workspace.draft()
    }

    /// The final path, as given by the caller.
    pub fn named(&self) -> &Path {
        &self.named
    }

    /// Rejects a non-empty target. `hint` is shown to the user.
    ///
    /// # Errors
    /// [`Error::Occupied`].
    pub fn refuse_occupied(&self, hint: &'static str) -> Result<(), Error> {
        match state(&self.target)? {
            State::Absent | State::Empty => Ok(()),
            State::Occupied => Err(Error::Occupied { dir: self.named.clone(), hint }),
        }
    }

    /// Makes the files durable and renames the folder to the target, which must be absent or an empty folder.
    ///
    /// # Errors
    /// [`Error::Occupied`] if the target is no longer empty; [`Error::Write`].
    pub fn commit(self) -> Result<(), Error> {
        self.give_name(None)
    }

    /// Like [`NewFolder::commit`], but replaces an existing target. Moves all subfolders of the old
    /// folder, and files with `ours(name)` false, into the new one.
    ///
    /// # Errors
    /// [`Error::Write`]. The old folder is then unchanged.
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
            // Preserves the mode of the existing folder.
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
                // Fails if the folder is no longer empty.
                rename(&new, target)?;
                fault!("folder.renamed");
            }
        }
        // The target now exists, so its parents must stay. Later errors are reported, but nothing is lost.
        self.created.clear();
        sync_folder(folder_of(target))?;
        fault!("folder.parent_synced");
        self.workspace.settle(target)
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // Best effort: the next start does the rest. The workspace removes itself afterwards.
        let _ = self.workspace.settle(&self.target);
        self.workspace.remove();
        remove_created(&self.created);
    }
}

/// The locked folder `.ft-NAME.tmp`.
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
            // Name the target in the message, not the workspace.
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

    /// Lists the files of `target` to be moved into the new folder in `keep`, before any change.
    fn keep(&self, target: &Path, ours: &dyn Fn(&str) -> bool) -> Result<(), Error> {
        let fail = |e| Error::write("list", target, None, e);
        let is_folder = target.symlink_metadata().map_err(fail)?.is_dir();
        let mut names = BTreeSet::new();
        // If `target` is a link, only the link is replaced, and the contents stay in place.
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

    /// Completes or reverts an interrupted replacement, and removes drafts. Afterwards the workspace
    /// contains only the lock.
    fn settle(&self, target: &Path) -> Result<(), Error> {
        let keeps = there(&self.dir.join(KEEP));
        let names = if keeps { read_inside(&self.dir, KEEP, MOST_NAMES)? } else { Vec::new() };
        let old = self.old();
        if there(&old) && !there(target) {
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

    /// Removes the workspace, if settled.
    fn remove(&mut self) {
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Empty,
    Occupied,
}

/// State of a path. A link or a file counts as occupied.
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

/// Whether a path exists, without following links.
fn there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

fn is_folder(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.is_dir())
}

/// Resolves links in the path of a folder, if it exists.
fn real(path: &Path) -> Result<PathBuf, Error> {
    let real = loop {
        match path.canonicalize() {
            Ok(real) => break real,
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(Error::write("use", path, None, e)),
            Err(e) => match path.symlink_metadata() {
                // A dangling link.
                Ok(m) if m.is_symlink() => return Err(Error::write("use", path, None, e)),
                // Another process has just committed the folder.
                Ok(_) => {}
                Err(_) => return Ok(path.to_path_buf()),
            },
        }
    };
    // Another folder would replace it: a shell would be left in a deleted working directory, and a mount
    // cannot be renamed.
    let here = std::env::current_dir().and_then(|d| d.canonicalize());
    let device = |p: &Path| p.metadata().map(|m| m.dev()).ok();
    // An unknown device means that another process has just set the folder aside.
    let devices = device(&real).zip(real.parent().and_then(device));
    let is_mount = real.is_dir() && devices.is_some_and(|(own, above)| own != above);
    match is_mount || here.is_ok_and(|here| here.starts_with(&real)) {
        true => Err(no_name(path)),
        false => Ok(real),
    }
}

fn no_name(path: &Path) -> Error {
    Error::Name { dir: path.to_path_buf() }
}

/// Replaces the existing `target` by `new`. The old folder ends up at `new` or at `old`.
fn swap(new: &Path, target: &Path, old: &Path) -> Result<(), Error> {
    if exchange(new, target)? {
        fault!("folder.exchanged");
        return Ok(());
    }
    rename(target, old)?;
    fault!("folder.moved_aside");
    rename(new, target).inspect_err(|_| {
        // Settling would restore it too, but later.
        let _ = std::fs::rename(old, target);
    })?;
    fault!("folder.replaced");
    Ok(())
}

/// Exchanges two paths atomically. Returns false if not supported by the file system.
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

/// Syncs everything below a folder to disk.
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
