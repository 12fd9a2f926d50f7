//! Checkpoints: folders of files that are whole or absent.
//!
//! ```text
//! checkpoints/step-00000100/   what the trainer wrote
//!                  manifest.json   each file's size and BLAKE3 hash
//!                  COMPLETE        the hash of the manifest; written last
//!             .draft-00000200/     being written; swept at the next start
//!             .old-00000100/       set aside while a step is saved again
//! ```
//!
//! A save goes: files, fsync of each, manifest, fsync of the folders, rename to the step's name,
//! fsync of the parent, marker. A removal goes the other way: marker first, then data. So a folder
//! with a marker has all its data, whenever the power goes; and as the marker holds the manifest's
//! hash and the manifest every file's, a change of any single bit is found before a file is used.

mod manifest;

#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};

use super::Error;
use super::atomic::{sync_folder, write_atomic};
use super::fault::fault;
use super::path::read_inside;
use manifest::{MANIFEST, Manifest};

/// The file that says that a checkpoint is complete.
const MARKER: &str = "COMPLETE";
const STEP: &str = "step-";
const DRAFT: &str = ".draft-";
const OLD: &str = ".old-";

/// Whether a folder has checkpoints, whole or not, also one that a killed process had set aside. Nothing is changed.
pub fn any(dir: &Path) -> bool {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names = entries.map(|e| e.file_name().to_string_lossy().into_owned());
    names.any(|n| n.starts_with(STEP) || n.starts_with(OLD))
}

/// The folder of a run's checkpoints.
///
/// One process at a time: hold the run's [`super::RunLock`] before opening.
#[derive(Debug)]
pub struct Checkpoints {
    dir: PathBuf,
}

/// A checkpoint whose files are all what was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// The optimizer step after which it was taken.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// What is wrong with the newer ones that were passed over, a line each; print them.
    pub warnings: Vec<String>,
}

impl Checkpoints {
    /// Opens the folder, creating it if needed, and removes what killed processes left in it:
    /// drafts, steps without a marker. Files and folders with other names stay.
    ///
    /// # Errors
    /// [`Error::Write`] with the path.
    pub fn open(dir: &Path) -> Result<Checkpoints, Error> {
        std::fs::create_dir_all(dir).map_err(|e| Error::write("create", dir, None, e))?;
        let all = Checkpoints { dir: dir.to_path_buf() };
        for (name, path) in all.folders()? {
            let torn = step_of(&name, STEP).is_some() && !has_marker(&path);
            if torn || step_of(&name, DRAFT).is_some() {
                remove_folder(&path)?;
            }
        }
        // A step that was being saved again: the new one if it is complete, else the old one.
        for (name, path) in all.folders()? {
            if let Some(step) = step_of(&name, OLD) {
                let target = all.path_of(step);
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

    /// The checkpoints of a run that somebody else may be writing: nothing is changed.
    pub fn look(dir: &Path) -> Checkpoints {
        Checkpoints { dir: dir.to_path_buf() }
    }

    /// The steps of the complete checkpoints, ascending. Their content is not checked here.
    ///
    /// # Errors
    /// [`Error::Write`] when the folder cannot be listed.
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

    /// The newest checkpoint whose every file has the hash that was written down; `None` when there
    /// are no checkpoints. Damaged ones are passed over, and named in [`Checkpoint::warnings`].
    ///
    /// # Errors
    /// [`Error::AllDamaged`] when there are checkpoints and none is whole: starting from the
    /// beginning must then be the user's word.
    pub fn newest_whole(&self) -> Result<Option<Checkpoint>, Error> {
        let mut warnings = Vec::new();
        for step in self.list()?.into_iter().rev() {
            let path = self.path_of(step);
            match verify(&path, step) {
                Ok(()) => return Ok(Some(Checkpoint { step, path, warnings })),
                Err(e) => warnings.push(e.to_string()),
            }
        }
        if warnings.is_empty() {
            return Ok(None);
        }
        Err(Error::AllDamaged { dir: self.dir.clone(), damage: warnings })
    }

    /// The checkpoint of a step, if its every file has the hash that was written down.
    ///
    /// # Errors
    /// One that is not there, with those that are; a damaged one.
    pub fn whole(&self, step: u64) -> Result<Checkpoint, Error> {
        let steps = self.list()?;
        if !steps.contains(&step) {
            return Err(Error::NoCheckpoint { dir: self.dir.clone(), step, steps });
        }
        let path = self.path_of(step);
        verify(&path, step)?;
        Ok(Checkpoint { step, path, warnings: Vec::new() })
    }

    /// Removes all but the newest `keep`, that of the step `also`, and those of steps after `newest`, as
    /// [`Draft::commit`] does.
    ///
    /// # Errors
    /// [`Error::Write`] with the path.
    pub fn keep_to(&self, newest: u64, keep: usize, also: Option<u64>) -> Result<(), Error> {
        purge(self, newest, keep.max(1), also)
    }

    /// What tells a step's checkpoint from any other, of the same step too; `None` where there is none.
    pub fn mark(&self, step: u64) -> Option<Vec<u8>> {
        read_inside(&self.path_of(step), MARKER, 1 << 10).ok()
    }

    /// One file of a step's checkpoint, if it has the hash that was written down. The others are not looked at.
    ///
    /// # Errors
    /// A checkpoint that is not there, or has no such file; a damaged one.
    pub fn whole_file(&self, step: u64, name: &str) -> Result<PathBuf, Error> {
        let path = self.path_of(step);
        let manifest = manifest(&path)?;
        manifest.check_file(&path, step, name).map_err(|problem| damaged(&path, problem))?;
        Ok(path.join(name))
    }

    /// Starts the checkpoint of `step`: an empty folder to write files into.
    ///
    /// # Errors
    /// [`Error::Write`] with the path.
    pub fn begin(&self, step: u64) -> Result<Draft, Error> {
        let path = self.dir.join(format!("{DRAFT}{step:08}"));
        remove_folder(&path)?;
        std::fs::create_dir(&path).map_err(|e| Error::write("create", &path, None, e))?;
        fault!("draft.begun");
        Ok(Draft { dir: self.dir.clone(), path, step, committed: false })
    }

    /// The folder of a step's checkpoint, whether or not there is one.
    pub fn folder(&self, step: u64) -> PathBuf {
        self.path_of(step)
    }

    fn path_of(&self, step: u64) -> PathBuf {
        self.dir.join(format!("{STEP}{step:08}"))
    }

    /// The folders in the folder; links are not followed.
    fn folders(&self) -> Result<Vec<(String, PathBuf)>, Error> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.dir).map_err(|e| Error::write("list", &self.dir, None, e))? {
            let entry = entry.map_err(|e| Error::write("list", &self.dir, None, e))?;
            let kind = entry.file_type().map_err(|e| Error::write("read", &entry.path(), None, e))?;
            if let (true, Ok(name)) = (kind.is_dir(), entry.file_name().into_string()) {
                found.push((name, entry.path()));
            }
        }
        Ok(found)
    }
}

/// A checkpoint being written. Dropping it without [`Draft::commit`] removes it.
#[derive(Debug)]
pub struct Draft {
    dir: PathBuf,
    path: PathBuf,
    step: u64,
    committed: bool,
}

impl Draft {
    /// The folder to write files into, also in subfolders.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the checkpoint durable under its name, then removes all but the newest `keep` (this
    /// one always stays, so 0 is as 1) and that of the step `also`, and those of later steps, which a run that went on from an
    /// earlier step has abandoned. Returns its folder.
    ///
    /// # Errors
    /// [`Error::Write`] with the path. Whatever happens, the checkpoints before
    /// it are whole.
    pub fn commit(mut self, keep: usize, also: Option<u64>) -> Result<PathBuf, Error> {
        let manifest = Manifest::of(&self.path, self.step)?;
        let bytes = manifest.to_bytes();
        write_atomic(&self.path.join(MANIFEST), &bytes)?;
        fault!("commit.folder_synced");

        let all = Checkpoints { dir: self.dir.clone() };
        let target = all.path_of(self.step);
        // Saving a step again must not risk the one that is there: it goes aside, whole, until the
        // new one has its marker. `Checkpoints::open` puts it back if that never happens.
        let aside = self.dir.join(format!("{OLD}{:08}", self.step));
        if has_marker(&target) {
            remove_marked(&aside)?;
            rename(&target, &aside)?;
            fault!("commit.moved_aside");
        } else {
            // Of an earlier attempt that failed; what it set aside stays until this one is whole.
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
            // Best effort: the next start sweeps what stays.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// Removes the checkpoints that `keep` does not reach, and those after `newest`.
fn purge(all: &Checkpoints, newest: u64, keep: usize, also: Option<u64>) -> Result<(), Error> {
    let (mut kept, mut remove): (Vec<u64>, Vec<u64>) =
        all.list()?.into_iter().partition(|&step| step <= newest);
    let surplus = kept.len().saturating_sub(keep);
    remove.extend(kept.drain(..surplus).filter(|step| Some(*step) != also));
    for step in remove {
        remove_marked(&all.path_of(step))?;
    }
    Ok(())
}

/// Removes a checkpoint: the marker first, so that no moment shows a marker without data.
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
        Err(e) => Err(Error::write("remove", &marker, None, e)),
    }
}

fn remove_folder(path: &Path) -> Result<(), Error> {
    match std::fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::write("remove", path, None, e)),
        _ => Ok(()),
    }
}

fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    std::fs::rename(from, to).map_err(|e| Error::write("rename to", to, None, e))
}

/// A folder, a link or a pipe of that name is no marker: a checkpoint with one is as good as torn.
fn has_marker(path: &Path) -> bool {
    path.join(MARKER).symlink_metadata().is_ok_and(|m| m.is_file())
}

/// The step in a folder's name; only the spelling that this module writes counts.
fn step_of(name: &str, prefix: &str) -> Option<u64> {
    let step: u64 = name.strip_prefix(prefix)?.parse().ok()?;
    (name == format!("{prefix}{step:08}")).then_some(step)
}

/// What the marker of a manifest with these bytes says, to the byte.
fn marker(manifest: &[u8]) -> String {
    format!("ft checkpoint 1\n{}\n", blake3::hash(manifest).to_hex())
}

fn damaged(path: &Path, problem: String) -> Error {
    Error::Damaged { path: path.to_path_buf(), problem }
}

/// A checkpoint's manifest, which is the one that its marker names.
fn manifest(path: &Path) -> Result<Manifest, Error> {
    // A manifest names some dozens of files: a larger one is not ours.
    let read = |name: &str| read_inside(path, name, 16 << 20).map_err(|e| damaged(path, e.to_string()));
    let said = read(MARKER)?;
    let bytes = read(MANIFEST)?;
    if said != marker(&bytes).as_bytes() {
        return Err(damaged(path, format!("{MANIFEST} or {MARKER} is not what was written")));
    }
    Manifest::parse(&bytes).map_err(|problem| damaged(path, problem))
}

/// Checks every file of a checkpoint against its manifest, and that against the marker.
fn verify(path: &Path, step: u64) -> Result<(), Error> {
    manifest(path)?.check(path, step).map_err(|problem| damaged(path, problem))
}
