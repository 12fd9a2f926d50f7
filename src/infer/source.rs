//! Resolves run folders and checkpoints given in place of a model or an adapter.

use super::run_folder::{open_without_data, run_recipe};
use super::usage;
use crate::train::layout::{CHECKPOINTS, RESULTS, end_of, is_run, result_dir};
use crate::train::output;
use ft_base::store::checkpoint::Checkpoints;
use ft_base::terminal::{tell, warn};
use ft_engine::adapters;
use ft_hub::Want;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A folder with an adapter or a model, or a name to look up on the hub.
pub struct Source {
    /// Path or hub id to load from.
    pub name: String,
    /// Path or hub id for messages.
    pub shown: String,
    /// Run folder, if known.
    pub run: Option<PathBuf>,
    /// Temporary folder of a converted checkpoint, removed on drop.
    _converted: Option<TempDir>,
}

impl Source {
    /// Resolves a name. A run folder stands for its result, or for the newest checkpoint if the run has
    /// not ended.
    ///
    /// # Errors
    /// A GGUF file; a run without recipe, or without result and checkpoint; an unusable checkpoint.
    pub fn find(name: &str) -> ft_base::Result<Self> {
        let dir = Path::new(name);
        if dir.extension().is_some_and(|e| e == "gguf") && dir.is_file() {
            return Err(usage(format!(
                "{name}: ft writes GGUF and does not read it\n  hint: the folder that it was exported from"
            )));
        }
        if is_checkpoint(dir) {
            Checkpoints::check(dir)?;
            return Self::of_checkpoint(dir);
        }
        let result = RESULTS.iter().map(|r| dir.join(r)).find(|r| r.is_dir());
        if !is_run(dir) {
            let has = |file: &str| dir.join(file).is_file();
            if has("metrics.jsonl") && !has("config.json") && !has("adapter_config.json") {
                let or = result.map_or(String::new(), |r| format!(", or name its result: {}", r.display()));
                return Err(usage(format!("{name}: a run without its recipe.toml\n  hint: put it back{or}")));
            }
            let is_result = dir.file_name().is_some_and(|n| RESULTS.iter().any(|r| n == *r));
            let run = dir.parent().filter(|p| is_result && is_run(p) && end_of(p).is_some());
            return Ok(Self::named(name.into(), run));
        }
        if let Some(result) = result.as_ref().filter(|_| end_of(dir).is_some()) {
            return Ok(Self::named(result.display().to_string(), Some(dir)));
        }
        let folder = dir.join(CHECKPOINTS);
        let newest = if folder.is_dir() { Checkpoints::look(&folder).newest_whole()? } else { None };
        match (newest, result) {
            (Some(c), _) => {
                c.warnings.iter().for_each(|w| warn(w));
                Self::of_checkpoint(&c.path)
            }
            (None, None) => Err(usage(format!("{name}: this run has no result and no checkpoint yet"))),
            (None, Some(result)) => Err(usage(format!(
                "{name}: this run has not ended and has no checkpoint yet; {} is an earlier one's\n  \
                 hint: name that folder to use it",
                result.display()
            ))),
        }
    }

    fn named(name: String, run: Option<&Path>) -> Self {
        Self { shown: name.clone(), name, run: run.map(Path::to_path_buf), _converted: None }
    }

    fn of_checkpoint(dir: &Path) -> ft_base::Result<Self> {
        let fail = |why: &str| adapters::Error::Peft { file: dir.display().to_string(), why: why.into() };
        let run = dir.parent().and_then(Path::parent).filter(|r| r.join("recipe.toml").is_file());
        let run =
            run.ok_or_else(|| fail("a checkpoint is used with its run's recipe.toml, two folders above"))?;
        let mut recipe = run_recipe(run, &[])?;
        // conversion runs on the CPU
        recipe.run.device = ft_recipe::Device::Cpu;
        let job = open_without_data(recipe, Want::Tokenizer, false)?;
        let converted =
            tempfile::tempdir().map_err(|e| fail(&format!("no folder for what it holds: {e}")))?;
        let out = result_dir(&job.selection, converted.path());
        output::of_checkpoint(&job, dir, &out)?;
        tell(&format!("of checkpoint {}", dir.display()));
        let (name, shown) = (out.display().to_string(), dir.display().to_string());
        Ok(Self { name, shown, run: Some(run.into()), _converted: Some(converted) })
    }

    /// Whether the folder holds a whole model.
    pub fn is_model(&self) -> bool {
        Path::new(&self.name).join("config.json").is_file()
    }
}

fn is_checkpoint(dir: &Path) -> bool {
    ["state.json", "weights.safetensors"].iter().all(|f| dir.join(f).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_without_its_recipe_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let [run, result] = [dir.path().to_path_buf(), dir.path().join("adapter")];
        std::fs::write(run.join("metrics.jsonl"), "").unwrap();
        let name = run.display().to_string();
        let told = || Source::find(&name).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(told().ends_with("a run without its recipe.toml\n  hint: put it back"), "{}", told());
        std::fs::create_dir(&result).unwrap();
        let hint = format!("put it back, or name its result: {}", result.display());
        assert!(told().ends_with(&hint), "{}", told());
        std::fs::write(run.join("config.json"), "{}").unwrap();
        assert_eq!(told(), "");
    }
}
