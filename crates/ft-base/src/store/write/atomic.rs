//! Atomic file writes: temporary name in the same folder, fsync, rename, fsync of the folder.

use std::fs::{File, Permissions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::Serialize;
use tempfile::NamedTempFile;

use crate::store::Error;
use crate::store::fault::fault;
use crate::store::read::open_inside;

/// Prefix and suffix of temporary files and folders, by which a sweep finds the leftovers of killed
/// processes.
pub(in crate::store) const TEMPORARY: (&str, &str) = (".ft-", ".tmp");

/// A file being written under a temporary name. Removed on drop unless committed.
pub struct AtomicFile {
    file: NamedTempFile,
    path: PathBuf,
    needed: Option<u64>,
}

impl AtomicFile {
    /// Starts a file to be renamed to `path`, creating parent folders. `needed` is the final size in
    /// bytes, for messages.
    pub fn create(path: &Path, needed: Option<u64>) -> Result<AtomicFile, Error> {
        let dir = folder_of(path);
        std::fs::create_dir_all(dir).map_err(|e| Error::write_sized("create", dir, needed, e))?;
        loop {
            let file = tempfile::Builder::new()
                .prefix(TEMPORARY.0)
                .suffix(TEMPORARY.1)
                // As usual for new files, the umask decides. The default of tempfile would be 0600.
                .permissions(Permissions::from_mode(0o666))
                .tempfile_in(dir)
                .map_err(|e| Error::write_sized("create a file for", path, needed, e))?;
            if !hold(file.as_file()) {
                continue;
            }
            fault!("atomic.created");
            return Ok(AtomicFile { file, path: path.to_path_buf(), needed });
        }
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file
            .as_file_mut()
            .write_all(bytes)
            .map_err(|e| Error::write_sized("write", &self.path, self.needed, e))
    }

    /// Detaches the file from the name without renaming: an anonymous file, deleted when closed.
    pub fn unnamed(self) -> File {
        self.file.into_parts().0
    }

    /// Like [`AtomicFile::commit`], under another name in the same folder.
    pub fn commit_as(mut self, path: &Path) -> Result<(), Error> {
        self.path = path.to_path_buf();
        self.commit()
    }

    /// Renames the file to the final name as it is, and returns it for further writes.
    pub fn publish(self) -> Result<File, Error> {
        let fail = |e| Error::write_sized("create", &self.path, self.needed, e);
        let file = self.file.persist(&self.path).map_err(|e| fail(e.error))?;
        file.unlock().map_err(fail)?;
        Ok(file)
    }

    /// Makes the contents durable and renames the file to the final name.
    pub fn commit(self) -> Result<(), Error> {
        fault!("atomic.written");
        let AtomicFile { file, path, needed } = self;
        file.as_file().sync_all().map_err(|e| Error::write_sized("sync", &path, needed, e))?;
        fault!("atomic.synced");
        file.persist(&path).map_err(|e| Error::write_sized("rename to", &path, needed, e.error))?;
        fault!("atomic.renamed");
        sync_folder(folder_of(&path))?;
        fault!("atomic.folder_synced");
        Ok(())
    }
}

/// Locks a temporary file against sweeps by other processes. Returns false if a sweep was faster.
fn hold(file: &File) -> bool {
    match file.try_lock() {
        Ok(()) => file.metadata().is_ok_and(|m| m.nlink() > 0),
        Err(TryLockError::WouldBlock) => false,
        // On a file system without locks, sweeps fail to lock too, and remove nothing.
        Err(TryLockError::Error(_)) => true,
    }
}

/// Writes a file atomically: afterwards `path` durably has either the new or the previous contents.
/// Removes temporary files of killed processes in the same folder.
///
/// # Errors
/// [`Error::Write`] with the path, and with the bytes needed if the disk is full.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    // Best effort: leftovers are harmless.
    let _ = sweep_temporary(folder_of(path));
    let mut pending = AtomicFile::create(path, Some(bytes.len() as u64))?;
    pending.write(bytes)?;
    pending.commit()
}

/// Like [`write_atomic`], of a value as indented JSON with a newline at the end.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Error> {
    let text = serde_json::to_string_pretty(value).unwrap_or_default() + "\n";
    write_atomic(path, text.as_bytes())
}

/// Copies the file `name` atomically from folder `from` to folder `to`. Does nothing if the file is missing.
///
/// # Errors
/// [`Error::Unsafe`] if the file is not allowed by [`open_inside`], such as a link out of the folder;
/// [`Error::Read`]; [`Error::Write`].
pub fn copy_inside(from: &Path, name: &str, to: &Path) -> Result<(), Error> {
    let source = from.join(name);
    match source.symlink_metadata() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::read(&source, e)),
        Ok(_) => {}
    }
    let (mut file, source) = open_inside(from, name)?;
    let length = file.metadata().map_err(|e| Error::read(&source, e))?.len();
    let mut pending = AtomicFile::create(&to.join(name), Some(length))?;
    let mut buffer = vec![0u8; length.clamp(1, 1 << 20) as usize];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return pending.commit(),
            Ok(n) => pending.write(&buffer[..n])?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::read(&source, e)),
        }
    }
}

/// The parent folder of a file; `.` for a bare name.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

/// Makes renames and removals in a folder durable.
pub fn sync_folder(dir: &Path) -> Result<(), Error> {
    File::open(dir).and_then(|folder| folder.sync_all()).map_err(|e| Error::write("sync", dir, e))
}

/// Removes unlocked temporary files in a folder, left by killed processes.
pub fn sweep_temporary(dir: &Path) -> Result<(), Error> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::write("list", dir, e)),
    };
    for entry in entries {
        let entry = entry.map_err(|e| Error::write("list", dir, e))?;
        let name = entry.file_name();
        let is_file = entry.file_type().is_ok_and(|t| t.is_file());
        if is_file && name.to_str().is_some_and(|n| n.starts_with(TEMPORARY.0) && n.ends_with(TEMPORARY.1)) {
            remove_unheld(&entry.path())?;
        }
    }
    Ok(())
}

fn remove_unheld(path: &Path) -> Result<(), Error> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let opened = File::options().read(true).write(true).custom_flags(flags).open(path);
    let remove = |file: File| match file.try_lock() {
        // Removed under the lock: if another process has just created this file, `hold` reports it,
        // and a new one is created.
        Ok(()) => std::fs::remove_file(path),
        Err(_) => Ok(()),
    };
    removed(path, opened.and_then(remove))
}

/// Removes a file, unless it is missing.
pub fn remove_if_there(path: &Path) -> Result<(), Error> {
    removed(path, std::fs::remove_file(path))
}

/// The outcome of a removal. A missing file or folder is no error.
pub(in crate::store) fn removed(path: &Path, outcome: io::Result<()>) -> Result<(), Error> {
    match outcome {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::write("remove", path, e)),
        _ => Ok(()),
    }
}

/// Renames a file or folder.
pub(in crate::store) fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    std::fs::rename(from, to).map_err(|e| Error::write("rename to", to, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Failure;

    #[test]
    fn an_atomic_write_replaces_the_file_and_leaves_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/folder/file.json");
        write_atomic(&path, b"one").unwrap();
        write_atomic(&path, b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        let names: Vec<_> = std::fs::read_dir(path.parent().unwrap())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(names, ["file.json"]);
    }

    #[test]
    fn an_abandoned_file_disappears_and_the_old_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        write_atomic(&path, b"old").unwrap();
        let mut pending = AtomicFile::create(&path, None).unwrap();
        pending.write(b"half").unwrap();
        drop(pending);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// A sweep does not remove files that are being written, by this process or another.
    #[test]
    fn files_being_written_are_not_swept() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(".ft-dead.tmp"), b"x").unwrap();
        let mut pending = AtomicFile::create(&dir.path().join("large"), None).unwrap();
        pending.write(b"half").unwrap();
        write_atomic(&dir.path().join("small"), b"whole").unwrap();
        assert!(!dir.path().join(".ft-dead.tmp").exists());
        pending.commit().unwrap();
        assert_eq!(std::fs::read(dir.path().join("large")).unwrap(), b"half");
        // Many concurrent writers, all of them sweeping.
        std::thread::scope(|s| {
            for i in 0..8 {
                let path = dir.path().join(format!("{i}"));
                s.spawn(move || {
                    for round in 0..50u8 {
                        write_atomic(&path, &[round; 100]).unwrap();
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 10);
    }

    #[test]
    fn a_sweep_removes_temporary_files_of_ft_alone() {
        let dir = tempfile::tempdir().unwrap();
        for name in [".ft-x.tmp", ".ft-keep", "other.tmp"] {
            std::fs::write(dir.path().join(name), b"x").unwrap();
        }
        sweep_temporary(dir.path()).unwrap();
        assert!(!dir.path().join(".ft-x.tmp").exists());
        assert!(dir.path().join(".ft-keep").exists());
        assert!(dir.path().join("other.tmp").exists());
    }

    #[test]
    fn a_place_that_cannot_be_written_says_so_with_exit_5() {
        // A file in place of a folder fails for root too, unlike missing write permission.
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), b"").unwrap();
        let error = write_atomic(&dir.path().join("file/inner"), b"x").unwrap_err();
        assert_eq!(error.exit_code(), crate::ExitCode::Storage);
        assert!(error.to_string().contains("file"), "{error}");
    }

    #[test]
    fn failures_to_write_name_a_remedy() {
        use io::ErrorKind::*;
        for (kind, remedy) in [
            (StorageFull, "free some space"),
            (QuotaExceeded, "free some space"),
            (FileTooLarge, "(ulimit -f); raise it"),
            (ResourceBusy, "name a folder on it"),
            (CrossesDevices, "name a folder on it"),
            (ReadOnlyFilesystem, "mounted read-only; choose another folder"),
            (PermissionDenied, "this user may not write there"),
            (Unsupported, "mount it with -o flock"),
        ] {
            let text = Error::write("write", Path::new("file"), kind.into()).to_string();
            assert!(text.contains(remedy), "{text}");
        }
    }
}
