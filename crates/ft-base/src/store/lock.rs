//! Locks on folders, for one writing process per folder.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::Error;
use super::atomic::sweep_temporary;
use super::folder;

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
    dir: PathBuf,
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
            Err(e) => return Err(Error::write("create", d, None, e)),
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
        Err(e) => Err(Error::write("read", dir, None, e)),
    }
}

fn refuse(doing: &'static str, path: &Path, why: &str) -> Error {
    Error::write(doing, path, None, io::Error::other(why.to_string()))
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
        Err(e) if e.kind() == io::ErrorKind::NotFound && dir.symlink_metadata().is_err() => return Ok(None),
        Err(_) if path.symlink_metadata().is_ok_and(|m| m.is_symlink()) => {
            return Err(not_ours("it is a link, which ft does not write through"));
        }
        Err(e) => return Err(Error::write("open", &path, None, e)),
    };
    let fail = |doing, e| Error::write(doing, &path, None, e);
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

/// Exclusive right to write in a run folder, until dropped or the process ends.
#[derive(Debug)]
pub struct RunLock {
    lock: Lock,
}

impl RunLock {
    /// Locks the run folder `dir`, creating it if needed. Removes temporary files of killed processes in
    /// the folder and in subfolders.
    ///
    /// Drop removes the lock file, and newly created folders if they are empty.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process holds the lock; [`Error::Write`] if the folder is not
    /// writable (so a read-only disk is detected before the first step).
    pub fn take(dir: &Path) -> Result<RunLock, Error> {
        let lock = Lock::take(dir, false)?;
        sweep_temporary(dir)?;
        folder::sweep(dir, None);
        let entries = std::fs::read_dir(dir).map_err(|e| Error::write("list", dir, None, e))?;
        for entry in entries {
            let entry = entry.map_err(|e| Error::write("list", dir, None, e))?;
            // Workspaces still present belong to running processes.
            if entry.file_type().is_ok_and(|t| t.is_dir()) && !folder::is_workspace(&entry.file_name()) {
                sweep_temporary(&entry.path())?;
            }
        }
        Ok(RunLock { lock })
    }

    /// Whether a process has locked the run folder `dir`, judging by the lock file.
    pub fn is_taken(dir: &Path) -> bool {
        dir.join(LOCK).is_file()
    }

    /// The run folder.
    pub fn dir(&self) -> &Path {
        &self.lock.dir
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Failure;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_second_is_refused_until_the_first_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("runs/a");
        let first = RunLock::take(&dir).unwrap();
        let error = RunLock::take(&dir).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Locked { .. }));
        assert!(text.contains(&format!("process {}", std::process::id())), "{text}");
        assert!(text.contains("runs/a"), "{text}");
        drop(first);
        RunLock::take(&dir).unwrap();
    }

    #[test]
    fn what_was_created_for_a_lock_goes_with_it_unless_it_is_used() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("runs/a");
        drop(RunLock::take(&dir).unwrap());
        assert!(!root.path().join("runs").exists());
        std::fs::create_dir(root.path().join("runs")).unwrap();
        drop(RunLock::take(&dir).unwrap());
        assert!(root.path().join("runs").exists() && !dir.exists(), "only what it created");
        let lock = RunLock::take(&dir).unwrap();
        std::fs::write(dir.join("recipe.toml"), b"x").unwrap();
        drop(lock);
        let names: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["recipe.toml"]);
    }

    #[test]
    fn sweeps_the_run_folder_and_its_subfolders() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("model")).unwrap();
        let stale = [root.path().join(".ft-a.tmp"), root.path().join("model/.ft-b.tmp")];
        for path in &stale {
            std::fs::write(path, b"x").unwrap();
        }
        let _lock = RunLock::take(root.path()).unwrap();
        assert!(stale.iter().all(|p| !p.exists()));
    }

    /// A folder prepared by another user must not make a run overwrite files elsewhere.
    #[test]
    fn a_lock_is_never_written_through_a_link_or_over_a_file() {
        let root = tempfile::tempdir().unwrap();
        let notes = root.path().join("notes.txt");
        let lock = root.path().join("out/.lock");
        std::fs::create_dir(root.path().join("out")).unwrap();
        let make: [&dyn Fn(); 6] = [
            &|| symlink("../notes.txt", &lock).unwrap(),
            &|| symlink("../gone.txt", &lock).unwrap(),
            &|| std::fs::hard_link(&notes, &lock).unwrap(),
            &|| std::fs::write(&lock, b"mine").unwrap(),
            &|| std::fs::create_dir(&lock).unwrap(),
            &|| rustix::fs::mkfifoat(rustix::fs::CWD, &lock, rustix::fs::Mode::RWXU).unwrap(),
        ];
        for (i, make) in make.into_iter().enumerate() {
            // A hard link to a lock file of `ft` has the expected contents.
            std::fs::write(&notes, if i == 2 { "process 1\n" } else { "a user's" }).unwrap();
            let before = std::fs::read(&notes).unwrap();
            make();
            let error = RunLock::take(&root.path().join("out")).unwrap_err();
            assert_eq!(error.exit_code(), crate::ExitCode::Storage, "{i}: {error}");
            assert!(error.to_string().contains(".lock"), "{i}: {error}");
            assert_eq!(std::fs::read(&notes).unwrap(), before, "{i}");
            assert!(lock.symlink_metadata().is_ok() && !root.path().join("gone.txt").exists(), "{i}");
            std::fs::remove_file(&lock).or_else(|_| std::fs::remove_dir(&lock)).unwrap();
        }
        // A lock file left by a killed process is accepted.
        std::fs::write(&lock, b"process 1\n").unwrap();
        RunLock::take(&root.path().join("out")).unwrap();
    }
}
