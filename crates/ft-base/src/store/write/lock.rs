//! Locks on folders, for one writing process per folder.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::store::Error;

/// Name of the lock file.
pub(super) const LOCK: &str = ".lock";
/// Contents of a lock file before the process id.
const NOTE: &str = "process ";
/// Length limit of the contents in bytes.
const LONGEST: u64 = 64;

/// Exclusive right to write in a folder, until dropped or the process ends.
///
/// Uses `flock`, so a killed process leaves no lock behind. Drop removes the lock file, and folders
/// created along with the lock if they are empty.
#[derive(Debug)]
pub(super) struct Lock {
    // Closing the file releases the lock.
    _file: File,
    pub(super) dir: PathBuf,
    /// Newly created folders, outermost first.
    created: Vec<PathBuf>,
}

impl Lock {
    /// Locks the folder `dir`, creating it if needed. The lock file must not be a link, nor, with `own`,
    /// the folder: otherwise the creator of a prepared folder could redirect writes.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process holds the lock; [`Error::Write`] if the folder is not writable.
    pub(super) fn take(dir: &Path, own: bool) -> Result<Lock, Error> {
        let mut created = Vec::new();
        loop {
            let made = make_folders(dir, &mut created);
            let result = made.and_then(|()| if own { real_folder(dir) } else { Ok(()) });
            match result.and_then(|()| open(dir)) {
                Ok(Some(file)) => return Ok(Lock { _file: file, dir: dir.to_path_buf(), created }),
                // The previous holder removed the lock file between two of these steps.
                Ok(None) => {}
                Err(e) => {
                    remove_created(&created);
                    return Err(e);
                }
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Removed while still locked: a process that has already opened the file notices the removal and
        // creates a new one.
        let _ = std::fs::remove_file(self.dir.join(LOCK));
        remove_created(&self.created);
    }
}

/// Creates a folder and missing parents, and appends the new ones to `created`.
pub(super) fn make_folders(dir: &Path, created: &mut Vec<PathBuf>) -> Result<(), Error> {
    let missing = |d: &Path| !d.as_os_str().is_empty() && d.symlink_metadata().is_err();
    let above: Vec<&Path> = dir.ancestors().take_while(|d| missing(d)).collect();
    for d in above.into_iter().rev() {
        match std::fs::create_dir(d) {
            Ok(()) if created.iter().any(|c| c == d) => {}
            Ok(()) => created.push(d.to_path_buf()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(Error::write("create", d, e)),
        }
    }
    Ok(())
}

/// Removes empty folders created by [`make_folders`].
pub(super) fn remove_created(created: &[PathBuf]) {
    for d in created.iter().rev() {
        if std::fs::remove_dir(d).is_err() {
            return;
        }
    }
}

/// Rejects anything but a real folder at `dir`.
fn real_folder(dir: &Path) -> Result<(), Error> {
    match dir.symlink_metadata() {
        Ok(m) if m.is_dir() => Ok(()),
        Ok(_) => Err(refuse(
            "use",
            dir,
            "it is a link or a file, and ft needs a folder of that name\nhint: remove it",
        )),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::write("read", dir, e)),
    }
}

fn refuse(doing: &'static str, path: &Path, why: &str) -> Error {
    Error::write(doing, path, io::Error::other(why.to_string()))
}

fn is_link(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.is_symlink())
}

/// Whether no file can ever be created in a folder: a dangling link, or a deleted working directory.
fn is_unusable(dir: &Path) -> bool {
    is_link(dir) || dir.metadata().is_ok_and(|m| m.nlink() == 0)
}

/// Opens and locks the lock file of a folder. `None` if the file or the folder was removed meanwhile.
fn open(dir: &Path) -> Result<Option<File>, Error> {
    let path = dir.join(LOCK);
    let not_ours = |why: &str| {
        let hint = "hint: choose another folder, or move that file away";
        refuse("lock", &path, &format!("{why}\n{hint}"))
    };
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32)
        .open(&path);
    let mut file = match opened {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound && !is_unusable(dir) => return Ok(None),
        Err(_) if is_link(&path) => {
            return Err(not_ours("it is a link, which ft does not write through"));
        }
        Err(e) => return Err(Error::write("open", &path, e)),
    };
    let fail = |doing, e| Error::write(doing, &path, e);
    if !file.metadata().map_err(|e| fail("read", e))?.is_file() {
        return Err(not_ours("it is not a plain file"));
    }
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let holder = note(&mut file).ok().flatten().filter(|n| !n.is_empty());
            return Err(Error::Locked { dir: dir.to_path_buf(), holder });
        }
        Err(TryLockError::Error(e)) => return Err(fail("lock", e)),
    }
    let held = file.metadata().map_err(|e| fail("read", e))?;
    match path.symlink_metadata() {
        Ok(now) if (now.dev(), now.ino()) == (held.dev(), held.ino()) => {}
        Ok(_) => return Ok(None),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(fail("read", e)),
    }
    if held.nlink() > 1 || note(&mut file).map_err(|e| fail("read", e))?.is_none() {
        return Err(not_ours("it is a file that ft did not write"));
    }
    file.set_len(0)
        .and_then(|()| file.rewind())
        // In a single write: a process killed here leaves the whole note or nothing.
        .and_then(|()| file.write_all(format!("{NOTE}{}\n", std::process::id()).as_bytes()))
        .map_err(|e| {
            // On a full disk, leave nothing behind.
            let _ = std::fs::remove_file(&path);
            fail("write", e)
        })?;
    Ok(Some(file))
}

/// Reads a lock file. `None` if `ft` did not write it; a prefix of the note counts, since the file may
/// be new.
fn note(file: &mut File) -> io::Result<Option<String>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(LONGEST).read_to_end(&mut bytes)?;
    let Ok(text) = String::from_utf8(bytes) else { return Ok(None) };
    let text = text.trim_end();
    let number = text.strip_prefix(NOTE);
    let ours = NOTE.starts_with(text) || number.is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
    Ok(ours.then(|| text.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Its last user may remove a folder at any time before it is locked.
    #[test]
    fn a_folder_that_has_just_gone_is_not_refused() {
        let root = tempfile::tempdir().unwrap();
        real_folder(&root.path().join("gone")).unwrap();
    }
}
