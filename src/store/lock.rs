//! One process a run folder.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use super::Error;
use super::atomic::sweep_temporary;

/// The right to write in a run folder, held until it is dropped or the process ends.
///
/// The lock is the system's (`flock`), so a killed process leaves none behind.
#[derive(Debug)]
pub struct RunLock {
    // Held for its lock; closing the file releases it.
    _file: File,
    dir: PathBuf,
}

impl RunLock {
    /// Takes the run folder `dir`, creating it if needed, and removes the half-written files that
    /// a killed process left in it and in its subfolders.
    ///
    /// # Errors
    /// [`Error::Locked`] when another process holds it; [`Error::Write`] when the folder cannot be
    /// written (so a read-only disk is found before the first step).
    pub fn take(dir: &Path) -> Result<RunLock, Error> {
        std::fs::create_dir_all(dir).map_err(|e| Error::write("create", dir, None, e))?;
        let path = dir.join(".lock");
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|e| Error::write("open", &path, None, e))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // The note is a courtesy: a lock whose note cannot be read is a lock all the same.
                let _ = (&mut file).take(64).read_to_string(&mut holder);
                let holder = holder.trim();
                return Err(Error::Locked {
                    dir: dir.to_path_buf(),
                    holder: (!holder.is_empty()).then(|| holder.to_string()),
                });
            }
            Err(TryLockError::Error(e)) => return Err(Error::write("lock", &path, None, e)),
        }
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "process {}", std::process::id()))
            .map_err(|e| Error::write("write", &path, None, e))?;

        sweep_temporary(dir)?;
        let entries = std::fs::read_dir(dir).map_err(|e| Error::write("list", dir, None, e))?;
        for entry in entries {
            let entry = entry.map_err(|e| Error::write("list", dir, None, e))?;
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                sweep_temporary(&entry.path())?;
            }
        }
        Ok(RunLock { _file: file, dir: dir.to_path_buf() })
    }

    /// The run folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
