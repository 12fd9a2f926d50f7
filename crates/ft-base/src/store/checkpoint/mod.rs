//! Checkpoints: folders saved and removed atomically.
//!
//! ```text
//! checkpoints/step-00000100/   the trainer's files
//!                  manifest.json   size and BLAKE3 hash of each file
//!                  COMPLETE        hash of the manifest; written last
//!             .draft-00000200/     being written; removed at the next start
//!             .old-00000100/       set aside while a step is saved again
//! ```
//!
//! Saving: files, fsync of each, manifest, fsync of the folders, rename to the step's name, fsync of the
//! parent, marker. Removal runs in reverse: marker first, then data. Hence a folder with a marker
//! contains all data, even after a power cut. The marker contains the hash of the manifest and the
//! manifest the hash of every file, so any flipped bit is detected before a file is used.

mod manifest;

#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};

use manifest::{MANIFEST, MARKER, Manifest};

use super::Error;
use super::fault::fault;
use super::read::read_inside;
use super::write::{removed, rename, sync_folder, write_atomic};

const STEP: &str = "step-";
const DRAFT: &str = ".draft-";
const OLD: &str = ".old-";

/// Whether a folder contains checkpoints, complete or not, including one set aside by a killed process.
/// Read-only.
pub fn any(dir: &Path) -> bool {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names = entries.map(|e| e.file_name().to_string_lossy().into_owned());
    names.any(|n| n.starts_with(STEP) || n.starts_with(OLD))
}

/// The checkpoint folder of a run.
///
/// Not safe for concurrent processes: hold the run's [`super::RunLock`] before opening.
#[derive(Debug)]
pub struct Checkpoints {
    dir: PathBuf,
}

/// A verified checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// The optimizer step after which the checkpoint was saved.
    pub step: u64,
    /// Folder of the checkpoint.
    pub path: PathBuf,
    /// Damage found in newer, skipped checkpoints, one line per checkpoint. The caller prints them.
    pub warnings: Vec<String>,
}

impl Checkpoints {
    /// Opens the folder, creating it if needed, and removes the leftovers of killed processes: drafts,
    /// and steps without a marker. Keeps files and folders with foreign names.
    ///
    /// # Errors
    /// [`Error::Write`] with the path.
    pub fn open(dir: &Path) -> Result<Checkpoints, Error> {
        std::fs::create_dir_all(dir).map_err(|e| Error::write("create", dir, e))?;
        let all = Checkpoints { dir: dir.to_path_buf() };
        for (name, path) in all.folders()? {
            let torn = step_of(&name, STEP).is_some() && !has_marker(&path);
            if torn || step_of(&name, DRAFT).is_some() {
                remove_folder(&path)?;
            }
        }
        // If a step was being saved again, keep the new checkpoint if complete, else restore the old one.
        for (name, path) in all.folders()? {
            if let Some(step) = step_of(&name, OLD) {
                let target = all.folder(step);
                if has_marker(&target) || !has_marker(&path) {
                    remove_marked(&path)?;
                } else {
                    rename(&path, &target)?;
                    sync_folder(dir)?;
                }
            }
        }
        Ok(all)
    }

    /// Opens a checkpoint folder read-only, possibly while another process writes to it.
    pub fn look(dir: &Path) -> Checkpoints {
        Checkpoints { dir: dir.to_path_buf() }
    }

    /// Steps of the complete checkpoints, ascending. Does not verify the contents.
    ///
    /// # Errors
    /// [`Error::Write`] if the folder cannot be listed.
    pub fn list(&self) -> Result<Vec<u64>, Error> {
        let mut steps: Vec<u64> = self
            .folders()?
            .into_iter()
            .filter(|(_, path)| has_marker(path))
            .filter_map(|(name, _)| step_of(&name, STEP))
            .collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// The newest checkpoint whose files all match the recorded hashes; `None` if there are no
    /// checkpoints. Damaged ones are skipped and listed in [`Checkpoint::warnings`].
    ///
    /// # Errors
    /// [`Error::AllDamaged`] if checkpoints exist but all are damaged. The user must then decide to
    /// start from the beginning.
    pub fn newest_whole(&self) -> Result<Option<Checkpoint>, Error> {
        let mut warnings = Vec::new();
        for step in self.list()?.into_iter().rev() {
            let path = self.folder(step);
            match verify(&path, Some(step)) {
                Ok(()) => return Ok(Some(Checkpoint { step, path, warnings })),
                Err(e) => warnings.push(e.to_string()),
            }
        }
        if warnings.is_empty() {
            return Ok(None);
        }
        Err(Error::AllDamaged { dir: self.dir.clone(), damage: warnings })
    }

    /// The checkpoint of a step, verified against the recorded hashes.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`], with the existing steps; [`Error::Damaged`].
    pub fn whole(&self, step: u64) -> Result<Checkpoint, Error> {
        let steps = self.list()?;
        if !steps.contains(&step) {
            return Err(Error::NoCheckpoint { dir: self.dir.clone(), step, steps });
        }
        let path = self.folder(step);
        verify(&path, Some(step))?;
        Ok(Checkpoint { step, path, warnings: Vec::new() })
    }

    /// Verifies a checkpoint's folder of any name against the recorded hashes.
    ///
    /// # Errors
    /// [`Error::Damaged`].
    pub fn check(path: &Path) -> Result<(), Error> {
        verify(path, None)
    }

    /// Removes checkpoints of steps after `newest`, and all but the latest `keep` of the rest. Never
    /// removes the one of step `also` unless it is after `newest`.
    ///
    /// # Errors
    /// [`Error::Write`] with the path.
    pub fn keep_to(&self, newest: u64, keep: usize, also: Option<u64>) -> Result<(), Error> {
        let (mut kept, mut remove): (Vec<u64>, Vec<u64>) =
            self.list()?.into_iter().partition(|&step| step <= newest);
        let surplus = kept.len().saturating_sub(keep.max(1));
        remove.extend(kept.drain(..surplus).filter(|step| Some(*step) != also));
        remove.into_iter().try_for_each(|step| remove_marked(&self.folder(step)))
    }

    /// The contents of the marker file, which identify a checkpoint, even among checkpoints of the same
    /// step. `None` if there is no checkpoint.
    pub fn mark(&self, step: u64) -> Option<Vec<u8>> {
        read_inside(&self.folder(step), MARKER, 1 << 10).ok()
    }

    /// Path of one file of a checkpoint, verified against the recorded hash. Other files are not verified.
    ///
    /// # Errors
    /// [`Error::Damaged`] if the checkpoint or the file is missing or damaged.
    pub fn whole_file(&self, step: u64, name: &str) -> Result<PathBuf, Error> {
        let path = self.folder(step);
        let manifest = manifest(&path)?;
        manifest.check_file(&path, step, name).map_err(|problem| damaged(&path, problem))?;
        Ok(path.join(name))
    }

    /// Starts the checkpoint of `step`: creates an empty folder for the files.
    ///
    /// # Errors
    /// [`Error::Write`] with the path.
    pub fn begin(&self, step: u64) -> Result<Draft, Error> {
        let path = self.dir.join(format!("{DRAFT}{step:08}"));
        remove_folder(&path)?;
        std::fs::create_dir(&path).map_err(|e| Error::write("create", &path, e))?;
        fault!("draft.begun");
        Ok(Draft { dir: self.dir.clone(), path, step, committed: false })
    }

    /// The folder of a step's checkpoint, whether it exists or not.
    pub fn folder(&self, step: u64) -> PathBuf {
        self.dir.join(format!("{STEP}{step:08}"))
    }

    /// The subfolders, without following links.
    fn folders(&self) -> Result<Vec<(String, PathBuf)>, Error> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.dir).map_err(|e| Error::write("list", &self.dir, e))? {
            let entry = entry.map_err(|e| Error::write("list", &self.dir, e))?;
            let kind = entry.file_type().map_err(|e| Error::write("read", &entry.path(), e))?;
            if let (true, Ok(name)) = (kind.is_dir(), entry.file_name().into_string()) {
                found.push((name, entry.path()));
            }
        }
        Ok(found)
    }
}

/// A checkpoint being written. Removed on drop unless committed.
#[derive(Debug)]
pub struct Draft {
    dir: PathBuf,
    path: PathBuf,
    step: u64,
    committed: bool,
}

impl Draft {
    /// The folder for the files; subfolders are allowed.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the checkpoint durable under the final name, and returns the folder. Then keeps only the newest
    /// `keep` checkpoints (at least this one) and the one of step `also`. Checkpoints of later steps, abandoned
    /// by a run resumed from an earlier step, are removed.
    ///
    /// # Errors
    /// [`Error::Write`] with the path. Earlier checkpoints stay intact in any case.
    pub fn commit(mut self, keep: usize, also: Option<u64>) -> Result<PathBuf, Error> {
        let manifest = Manifest::of(&self.path, self.step)?;
        let bytes = manifest.to_bytes();
        write_atomic(&self.path.join(MANIFEST), &bytes)?;
        fault!("commit.folder_synced");

        let all = Checkpoints { dir: self.dir.clone() };
        let target = all.folder(self.step);
        // Saving a step again must not risk the existing checkpoint: it is set aside intact until the
        // new one has a marker. `Checkpoints::open` restores it after a crash.
        let aside = self.dir.join(format!("{OLD}{:08}", self.step));
        if has_marker(&target) {
            remove_marked(&aside)?;
            rename(&target, &aside)?;
            fault!("commit.moved_aside");
        } else {
            // Left by an earlier, failed attempt. A checkpoint set aside by that attempt stays until
            // this one is complete.
            remove_folder(&target)?;
        }
        rename(&self.path, &target)?;
        self.committed = true;
        fault!("commit.renamed");
        sync_folder(&self.dir)?;
        fault!("commit.parent_synced");
        write_atomic(&target.join(MARKER), marker(&bytes).as_bytes())?;
        fault!("commit.marked");
        remove_marked(&aside)?;
        all.keep_to(self.step, keep, also)?;
        Ok(target)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.committed {
            // Best effort: the next start removes leftovers.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// Removes a checkpoint, marker first, so that a marker without data can never be observed.
fn remove_marked(path: &Path) -> Result<(), Error> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    unmark(path)?;
    fault!("purge.unmarked");
    remove_folder(path)?;
    fault!("purge.removed");
    Ok(())
}

fn unmark(path: &Path) -> Result<(), Error> {
    let marker = path.join(MARKER);
    match std::fs::remove_file(&marker) {
        Ok(()) => sync_folder(path),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::write("remove", &marker, e)),
    }
}

fn remove_folder(path: &Path) -> Result<(), Error> {
    removed(path, std::fs::remove_dir_all(path))
}

/// Only a plain file is a marker. A checkpoint with a folder, link or pipe of this name counts as incomplete.
fn has_marker(path: &Path) -> bool {
    path.join(MARKER).symlink_metadata().is_ok_and(|m| m.is_file())
}

/// Parses the step from a folder name. Accepts only names in the exact format of this module.
fn step_of(name: &str, prefix: &str) -> Option<u64> {
    let step: u64 = name.strip_prefix(prefix)?.parse().ok()?;
    (name == format!("{prefix}{step:08}")).then_some(step)
}

/// The expected contents of the marker for a manifest with these bytes.
fn marker(manifest: &[u8]) -> String {
    format!("ft checkpoint 1\n{}\n", blake3::hash(manifest).to_hex())
}

fn damaged(path: &Path, problem: String) -> Error {
    Error::Damaged { path: path.to_path_buf(), problem }
}

/// Reads the manifest of a checkpoint and verifies it against the marker.
fn manifest(path: &Path) -> Result<Manifest, Error> {
    // Manifests list a few dozen files; the limit is far above this.
    let read = |name: &str| read_inside(path, name, 16 << 20).map_err(|e| damaged(path, e.to_string()));
    let said = read(MARKER)?;
    let bytes = read(MANIFEST)?;
    if said != marker(&bytes).as_bytes() {
        return Err(damaged(path, format!("{MANIFEST} or {MARKER} is not what was written")));
    }
    Manifest::parse(&bytes).map_err(|problem| damaged(path, problem))
}

/// Verifies the manifest against the marker, and every file against the manifest. `None`: of any step.
fn verify(path: &Path, step: Option<u64>) -> Result<(), Error> {
    let manifest = manifest(path)?;
    manifest.check(path, step.unwrap_or(manifest.step())).map_err(|problem| damaged(path, problem))
}
