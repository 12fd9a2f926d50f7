//! Cached inputs of finished runs: `--resume` of a finished run returns at once, without reading data and
//! model.
//!
//! An entry holds the recipe and the metadata of all input and output files. Any difference or missing file
//! falls back to the full checks.

use crate::train::layout::{CHECKPOINTS, RESULTS};
use crate::train::preference::reference_model;
use ft_base::store::{self, cache_folder, hash::Stat, sweep_oldest};
use ft_data::TOOL_USE;
use ft_hub::{Settings, Want};
use ft_plan::resolve;
use ft_recipe::{Recipe, Weights};
use serde::{Deserialize, Serialize};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Maximum number of entries; the oldest go first.
const MAX_ENTRIES: usize = 512;
/// Maximum size of an entry in bytes.
const MAX_BYTES: u64 = 16 << 20;

/// Paths with file metadata, sorted.
type Files = Vec<(PathBuf, Stat)>;

/// Inputs of a run, recorded before any is read.
pub struct InputRecord {
    recipe: String,
    files: Files,
    seen: SystemTime,
}

/// Cache entry of a finished run.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct CacheEntry {
    ft: String,
    run: PathBuf,
    recipe: String,
    inputs: Files,
    outputs: Files,
    result: PathBuf,
}

impl InputRecord {
    /// Collects the metadata of all files named in a recipe, without reading them. Returns `None` if a file
    /// is missing.
    pub fn collect(recipe: &Recipe) -> Option<Self> {
        let seen = SystemTime::now();
        let mut files = model_files(recipe)?;
        if let Some(other) = reference_model::recipe_of(recipe) {
            files.extend(model_files(&other)?);
        }
        for source in recipe.data.all_sources() {
            for path in ft_data::find(source, &|s| recipe.resolve(s)).ok()? {
                files.push(stat(&path)?);
            }
        }
        if let Some(path) = &recipe.data.chat_template {
            files_of_template(&recipe.resolve(&path.display().to_string()), &mut files)?;
        }
        files.sort_by(|a, b| a.0.cmp(&b.0));
        files.dedup_by(|a, b| a.0 == b.0);
        Some(Self { recipe: recipe.to_toml(), files, seen })
    }

    /// Returns the result of a finished run if the cached entry still matches.
    pub fn finished(&self, dir: &Path) -> Option<PathBuf> {
        let (place, run) = place(dir)?;
        let bytes = store::read_inside(place.parent()?, place.file_name()?.to_str()?, MAX_BYTES).ok()?;
        let entry: CacheEntry = serde_json::from_slice(&bytes).ok()?;
        (entry == self.entry(run, outputs(dir)?, entry.result.clone())).then(|| dir.join(entry.result))
    }

    /// Stores an entry for a finished run, unless inputs have changed since the start. Best effort: without an entry,
    /// the next `--resume` runs all checks.
    pub fn store(&self, recipe: &Recipe, dir: &Path, result: &Path) {
        let same = Self::collect(recipe).is_some_and(|now| now.files == self.files);
        if !same || !self.files.iter().all(|(_, s)| s.settled(self.seen)) {
            return;
        }
        let made = || {
            let (place, run) = place(dir)?;
            let name = PathBuf::from(result.file_name()?);
            Some((place, serde_json::to_vec(&self.entry(run, outputs(dir)?, name)).ok()?))
        };
        if let Some((place, bytes)) = made()
            && store::write_atomic(&place, &bytes).is_ok()
            && let Some(folder) = place.parent()
        {
            sweep_oldest(folder, MAX_ENTRIES);
        }
    }

    fn entry(&self, run: PathBuf, outputs: Files, result: PathBuf) -> CacheEntry {
        let (recipe, inputs) = (self.recipe.clone(), self.files.clone());
        CacheEntry { ft: env!("CARGO_PKG_VERSION").into(), run, recipe, inputs, outputs, result }
    }
}

/// Files of the initial model and adapter of a recipe.
fn model_files(recipe: &Recipe) -> Option<Files> {
    let mut files = Vec::new();
    let settings = Settings { offline: true, ..Settings::from_env() };
    let want = if recipe.model.weights == Weights::Load { Want::Weights } else { Want::Config };
    let source = resolve::source_path(recipe, &recipe.model.source);
    let model = ft_hub::fetch_model_with(&settings, &source, &recipe.model.revision, want, false).ok()?;
    files_of(&model.dir, &mut files)?;
    if let Some(dir) = resolve::adapter_dir(&settings, recipe, false).ok()? {
        files_of(&dir, &mut files)?;
    }
    Some(files)
}

/// Path of the cache entry for a run folder, and the canonical path of the folder.
fn place(dir: &Path) -> Option<(PathBuf, PathBuf)> {
    let run = dir.canonicalize().ok()?;
    let name = blake3::hash(run.as_os_str().as_bytes()).to_hex();
    Some((cache_folder()?.join("finished").join(&name.as_str()[..32]), run))
}

/// Output files of a finished run. The folder of checkpoints stands in for all checkpoints.
fn outputs(dir: &Path) -> Option<Files> {
    let mut files = vec![stat(&dir.join("metrics.jsonl"))?, stat(&dir.join(CHECKPOINTS))?];
    for name in RESULTS {
        let result = dir.join(name);
        if result.is_dir() {
            files_of(&result, &mut files)?;
        }
    }
    files.sort_by(|a, b| a.0.cmp(&b.0));
    Some(files)
}

/// Adds the files in a folder, and [`TOOL_USE`] below it. Symbolic links count as their targets.
fn files_of(dir: &Path, files: &mut Files) -> Option<()> {
    for entry in std::fs::read_dir(dir).ok()? {
        let path = entry.ok()?.path();
        if !path.is_dir() {
            files.push(stat(&path)?);
        }
    }
    tool_use_of(dir, files)
}

/// Adds a given chat template, and [`TOOL_USE`] beside it.
fn files_of_template(path: &Path, files: &mut Files) -> Option<()> {
    files.push(stat(path)?);
    tool_use_of(store::folder_of(path), files)
}

fn tool_use_of(dir: &Path, files: &mut Files) -> Option<()> {
    let tool_use = dir.join(TOOL_USE);
    if tool_use.exists() {
        files.push(stat(&tool_use)?);
    }
    Some(())
}

/// Canonical path and metadata of a file. Returns `None` if the path is not UTF-8.
fn stat(path: &Path) -> Option<(PathBuf, Stat)> {
    let real = path.canonicalize().ok().filter(|p| p.to_str().is_some())?;
    let stat = Stat::of(&std::fs::metadata(&real).ok()?);
    Some((real, stat))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hash of the tokenizer includes this template, beside a given one too.
    #[test]
    fn files_of_a_model_include_its_template_for_tools() -> std::io::Result<()> {
        let dir = tempfile::tempdir()?;
        let all = || {
            let mut files = Vec::new();
            files_of(dir.path(), &mut files)
                .map(|()| files.into_iter().map(|(path, _)| path).collect::<Vec<_>>())
        };
        std::fs::create_dir(dir.path().join("additional_chat_templates"))?;
        assert_eq!(all(), Some(Vec::new()));
        std::fs::write(dir.path().join(TOOL_USE), "{{ tools }}")?;
        let real = dir.path().canonicalize()?;
        assert_eq!(all(), Some(vec![real.join(TOOL_USE)]));
        let given = dir.path().join(ft_data::CHAT_TEMPLATE);
        std::fs::write(&given, "{{ messages }}")?;
        let mut files = Vec::new();
        assert_eq!(files_of_template(&given, &mut files), Some(()));
        let paths: Vec<_> = files.into_iter().map(|(path, _)| path).collect();
        assert_eq!(paths, [real.join(ft_data::CHAT_TEMPLATE), real.join(TOOL_USE)]);
        Ok(())
    }
}
