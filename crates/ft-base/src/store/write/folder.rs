//! Folders written atomically: a run's result, a merged or quantized model, an export, the 4-bit cache.
//!
//! ```text
//! NAME/               seen by readers: either the old or the new folder, never a mix
//! .ft-NAME.tmp/       workspace next to it, while a process writes NAME
//!              .lock  held by this process
//!              new/   being filled; then synced to disk and renamed to NAME
//!              keep   names of foreign entries in the old NAME, to be moved into the new one
//!              old/   the old NAME, on file systems without atomic exchange of folders
//! ```
//!
//! To replace NAME, `new` and NAME are exchanged (`RENAME_EXCHANGE`), so NAME exists at any time.
//! Without support for this, the old folder is set aside first; if the process is killed at this point,
//! the next start restores it. A failing process removes its `.ft-NAME.tmp`. A killed one leaves it
//! behind unlocked, and the next process to write into the same parent settles and removes it.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::atomic::{folder_of, rename, sync_folder};
use super::lock::{make_folders, remove_created};
use super::workspace::{Workspace, sweep};
use crate::store::Error;
use crate::store::fault::fault;

/// Number of attempts to lock a workspace, and the pause between them. A sweep holds the lock only briefly.
const TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_millis(30);

/// A folder being written under a temporary name. Removed on drop unless committed.
#[derive(Debug)]
pub struct AtomicFolder {
    target: PathBuf,
    /// Name of the target in messages.
    named: PathBuf,
    workspace: Workspace,
    /// Newly created parents of the target.
    created: Vec<PathBuf>,
}

impl AtomicFolder {
    /// Starts the folder `target`, invisible until committed. Removes leftovers of killed processes in
    /// the parent.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process is writing the folder; [`Error::Name`] if the path has no
    /// file name; [`Error::Write`].
    pub fn begin(target: &Path) -> Result<AtomicFolder, Error> {
        for _ in 0..TRIES {
            match AtomicFolder::try_begin(target, target) {
                Err(Error::Locked { .. }) => std::thread::sleep(PAUSE),
                other => return other,
            }
        }
        AtomicFolder::try_begin(target, target)
    }

    /// Like [`AtomicFolder::begin`], for a path given by the user: a link to a folder stands for the
    /// folder. The working directory is not allowed.
    ///
    /// # Errors
    /// As [`AtomicFolder::begin`].
    pub fn begin_named(named: &Path) -> Result<AtomicFolder, Error> {
        let mut begun = AtomicFolder::begin(&real(named)?)?;
        begun.named = named.to_path_buf();
        Ok(begun)
    }

    /// Like [`AtomicFolder::begin_named`], but waits while another process writes the folder. Calls `told`
    /// once with the holder when waiting starts.
    ///
    /// # Errors
    /// As [`AtomicFolder::begin`].
    pub fn begin_waiting(named: &Path, told: &dyn Fn(Option<&str>)) -> Result<AtomicFolder, Error> {
        let mut tried = 0;
        loop {
            match AtomicFolder::try_begin(&real(named)?, named) {
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

    fn try_begin(target: &Path, named: &Path) -> Result<AtomicFolder, Error> {
        let name = target.file_name().map(OsStr::to_os_string).ok_or_else(|| no_name(named))?;
        let parent = folder_of(target);
        let mut created = Vec::new();
        let begun = make_folders(parent, &mut created)
            .and_then(|()| Workspace::take(parent, &name))
            .and_then(|workspace| {
                workspace.settle(target)?;
                let new = workspace.draft();
                std::fs::create_dir(&new).map_err(|e| Error::write("create", &new, e))?;
                Ok(workspace)
            });
        let workspace = begun.inspect_err(|_| remove_created(&created))?;
        sweep(parent, Some(&name));
        fault!("folder.begun");
        let (target, named) = (target.to_path_buf(), named.to_path_buf());
        Ok(AtomicFolder { target, named, workspace, created })
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

    /// Like [`AtomicFolder::commit`], but replaces an existing target. Moves files of the old folder with
    /// `ours("name")` false, and subfolders with `ours("name/")` false, into the new one; of other subfolders, entries
    /// with `ours("folder/name")` false.
    ///
    /// # Errors
    /// [`Error::Write`], also if the new folder has a file in the place of a folder to move, or the reverse. The old
    /// folder is then unchanged.
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

impl Drop for AtomicFolder {
    fn drop(&mut self) {
        // Best effort: the next start does the rest. The workspace removes itself afterwards.
        let _ = self.workspace.settle(&self.target);
        self.workspace.remove();
        remove_created(&self.created);
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
        Err(e) => Err(Error::write("read", path, e)),
        Ok(m) if m.is_dir() => match std::fs::read_dir(path) {
            Ok(mut entries) => Ok(if entries.next().is_none() { State::Empty } else { State::Occupied }),
            Err(e) => Err(Error::write("list", path, e)),
        },
        Ok(_) => Ok(State::Occupied),
    }
}

/// Resolves links in the path of a folder, if it exists.
fn real(path: &Path) -> Result<PathBuf, Error> {
    let real = loop {
        match path.canonicalize() {
            Ok(real) => break real,
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(Error::write("use", path, e)),
            Err(e) => match path.symlink_metadata() {
                // A dangling link.
                Ok(m) if m.is_symlink() => return Err(Error::write("use", path, e)),
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
    if is_mount || here.is_ok_and(|here| here.starts_with(&real)) { Err(no_name(path)) } else { Ok(real) }
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
    if crate::store::fault::without_exchange() {
        return Ok(false);
    }
    match renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(true),
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => Ok(false),
        Err(e) => Err(Error::write("replace", b, e.into())),
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn exchange(_: &Path, _: &Path) -> Result<bool, Error> {
    Ok(false)
}

/// Syncs everything below a folder to disk.
fn sync_tree(dir: &Path) -> Result<(), Error> {
    for entry in std::fs::read_dir(dir).map_err(|e| Error::write("list", dir, e))? {
        let entry = entry.map_err(|e| Error::write("list", dir, e))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(|e| Error::write("read", &path, e))?;
        if kind.is_dir() {
            sync_tree(&path)?;
        } else if kind.is_file() {
            File::open(&path).and_then(|f| f.sync_all()).map_err(|e| Error::write("sync", &path, e))?;
        }
    }
    sync_folder(dir)
}

#[cfg(test)]
#[path = "folder_tests.rs"]
mod tests;
