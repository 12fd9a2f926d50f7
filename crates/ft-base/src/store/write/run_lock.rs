//! Locks on run folders.

use std::path::Path;
use std::time::Duration;

use super::atomic::sweep_temporary;
use super::lock::{LOCK, Lock};
use super::workspace::{is_workspace, sweep};
use crate::store::Error;

/// Number of attempts to lock a run folder, and the pause between them: a killed process holds its locks until the
/// system has taken back its memory.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(100);

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
    /// [`Error::Locked`] if another process holds the lock for two seconds; [`Error::Write`] if the folder is not
    /// writable (so a read-only disk is detected before the first step).
    pub fn take(dir: &Path) -> Result<RunLock, Error> {
        Self::take_with(dir, &mut || std::thread::sleep(PAUSE))
    }

    fn take_with(dir: &Path, pause: &mut dyn FnMut()) -> Result<RunLock, Error> {
        let lock = (1..TRIES).find_map(|_| match Lock::take(dir, false) {
            Err(Error::Locked { .. }) => {
                pause();
                None
            }
            other => Some(other),
        });
        let lock = lock.unwrap_or_else(|| Lock::take(dir, false))?;
        sweep_temporary(dir)?;
        sweep(dir, None);
        let entries = std::fs::read_dir(dir).map_err(|e| Error::write("list", dir, e))?;
        for entry in entries {
            let entry = entry.map_err(|e| Error::write("list", dir, e))?;
            // Workspaces still present belong to running processes.
            if entry.file_type().is_ok_and(|t| t.is_dir()) && !is_workspace(&entry.file_name()) {
                // leftovers in a folder of another user are harmless
                let _ = sweep_temporary(&entry.path());
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
    fn a_second_lock_is_refused_until_the_first_is_dropped() {
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
    fn a_lock_held_for_a_moment_is_waited_for() {
        let root = tempfile::tempdir().unwrap();
        let mut first = Some(RunLock::take(root.path()).unwrap());
        let mut pauses = 0;
        let second = RunLock::take_with(root.path(), &mut || {
            pauses += 1;
            if pauses == 3 {
                first = None;
            }
        });
        assert!(second.is_ok() && pauses == 3);
    }

    #[test]
    fn folders_created_for_a_lock_are_removed_unless_used() {
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
    fn a_run_lock_sweeps_the_run_folder_and_its_subfolders() {
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
