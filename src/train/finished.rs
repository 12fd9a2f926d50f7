//! What a finished run was made from, kept in the user's cache: `--resume` of it can then say that it is finished
//! without reading its data and model again.
//!
//! Kept are the recipe, and the data, model and adapter files and the run's own as the system describes them. Where
//! anything of that is another, or not known, the run is looked at in full.

use super::job;
use super::output::RESULTS;
use super::run::CHECKPOINTS;
use ft_data::hub::{self, Settings, Want};
use ft_recipe::{Recipe, Weights};
use ft_base::store::{self, cache_folder, hash::Stat, sweep_oldest};
use serde::{Deserialize, Serialize};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Runs that are remembered; the oldest go.
const KEPT: usize = 512;
/// Bytes of what is remembered of a run, at most.
const MOST: u64 = 16 << 20;

/// Files with what the system says of them, sorted.
type Files = Vec<(PathBuf, Stat)>;

/// What a run is made from, as it was before anything of it was read.
pub struct Inputs {
    recipe: String,
    files: Files,
    seen: SystemTime,
}

/// What is kept of a finished run.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Kept {
    ft: String,
    run: PathBuf,
    recipe: String,
    inputs: Files,
    outputs: Files,
    result: PathBuf,
}

impl Inputs {
    /// Looks at the files that a recipe names, and reads none of them; `None` where they are not all here.
    pub fn look(recipe: &Recipe) -> Option<Self> {
        let seen = SystemTime::now();
        let mut files = Vec::new();
        let settings = Settings { offline: true, ..Settings::from_env() };
        let want = if recipe.model.weights == Weights::Load { Want::Weights } else { Want::Config };
        let source = job::source(recipe, &recipe.model.source);
        let model = hub::fetch_model_with(&settings, &source, &recipe.model.revision, want, false).ok()?;
        files_of(&model.dir, &mut files)?;
        if let Some(written) = recipe.lora.init.adapter() {
            let dir =
                hub::fetch_adapter_with(&settings, &job::source(recipe, written), "main", false).ok()?;
            files_of(&dir, &mut files)?;
        }
        for source in recipe.data.train.iter().chain(&recipe.data.eval) {
            for path in ft_data::find(source, &|s| recipe.resolve(s)).ok()? {
                files.push(stat(&path)?);
            }
        }
        if let Some(path) = &recipe.data.chat_template {
            files.push(stat(&recipe.resolve(&path.display().to_string()))?);
        }
        files.sort_by(|a, b| a.0.cmp(&b.0));
        Some(Self { recipe: recipe.to_toml(), files, seen })
    }

    /// The result of the run in a folder, if it was kept and everything is as it was.
    pub fn finished(&self, dir: &Path) -> Option<PathBuf> {
        let (place, run) = place(dir)?;
        let bytes = store::read_inside(place.parent()?, place.file_name()?.to_str()?, MOST).ok()?;
        let kept: Kept = serde_json::from_slice(&bytes).ok()?;
        (kept == self.kept(run, outputs(dir)?, kept.result.clone())).then(|| dir.join(kept.result))
    }

    /// Keeps that the run in a folder is finished, if what it was made from is still what it was when it began. Best
    /// effort: without it, the next `--resume` looks at everything.
    pub fn keep(&self, recipe: &Recipe, dir: &Path, result: &Path) {
        let same = Self::look(recipe).is_some_and(|now| now.files == self.files);
        if !same || !self.files.iter().all(|(_, s)| s.settled(self.seen)) {
            return;
        }
        let made = || {
            let (place, run) = place(dir)?;
            let name = PathBuf::from(result.file_name()?);
            Some((place, serde_json::to_vec(&self.kept(run, outputs(dir)?, name)).ok()?))
        };
        if let Some((place, bytes)) = made()
            && store::write_atomic(&place, &bytes).is_ok()
            && let Some(folder) = place.parent()
        {
            sweep_oldest(folder, KEPT);
        }
    }

    fn kept(&self, run: PathBuf, outputs: Files, result: PathBuf) -> Kept {
        let (recipe, inputs) = (self.recipe.clone(), self.files.clone());
        Kept { ft: env!("CARGO_PKG_VERSION").into(), run, recipe, inputs, outputs, result }
    }
}

/// Where it is kept that the run in a folder is finished, and the folder's path without links.
fn place(dir: &Path) -> Option<(PathBuf, PathBuf)> {
    let run = dir.canonicalize().ok()?;
    let name = blake3::hash(run.as_os_str().as_bytes()).to_hex();
    Some((cache_folder()?.join("finished").join(&name.as_str()[..32]), run))
}

/// What a finished run leaves; of its checkpoints, that none came or went.
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

/// Adds the files of a folder; links count as what they lead to.
fn files_of(dir: &Path, files: &mut Files) -> Option<()> {
    for entry in std::fs::read_dir(dir).ok()? {
        let path = entry.ok()?.path();
        if !path.is_dir() {
            files.push(stat(&path)?);
        }
    }
    Some(())
}

/// A path that can be kept as text, without links, and what the system says of the file.
fn stat(path: &Path) -> Option<(PathBuf, Stat)> {
    let real = path.canonicalize().ok().filter(|p| p.to_str().is_some())?;
    let stat = Stat::of(&std::fs::metadata(&real).ok()?);
    Some((real, stat))
}
