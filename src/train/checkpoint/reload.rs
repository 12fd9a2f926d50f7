//! The newest weights of a run, for inference: `ft serve` answers with them during training.

use super::state;
use crate::log::{last_event, read_metrics};
use crate::train::job::Job;
use crate::train::layout::CHECKPOINTS;
use ft_base::store::checkpoint::Checkpoints;
use ft_data::hub::Want;
use ft_engine::adapt::Params;
use ft_recipe::{Dtype, Offload, Quantize, Recipe};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// Number of attempts if checkpoints are deleted while they are read.
const TRIES: usize = 8;

/// Loads the resolved recipe of a run folder. The model source is replaced by the path recorded in the
/// metrics.
///
/// # Errors
/// Unreadable recipe.
pub fn recipe_of(run: &Path) -> ft_base::Result<Recipe> {
    let mut recipe = Recipe::load(&run.join("recipe.toml"), &[])?;
    // Relative to the working directory of the run.
    let events = read_metrics(&run.join("metrics.jsonl")).unwrap_or_default();
    let found = events.iter().find_map(|e| e["model"]["source"].as_str());
    if let Some(source) = found.filter(|s| Path::new(s).exists()) {
        recipe.model.source = source.into();
    }
    Ok(recipe)
}

/// Returns the last event of a run if it is `end`. Otherwise, the result on disk belongs to an earlier run
/// or step.
pub fn end_of(run: &Path) -> Option<serde_json::Value> {
    last_event(&run.join("metrics.jsonl")).filter(|e| e["event"] == "end")
}

/// Returns the step of the result, if the run has ended.
pub fn ended_at(run: &Path) -> Option<u64> {
    end_of(run)?["of_step"].as_u64()
}

/// Overrides for loading the model of a run.
#[derive(Clone, Debug)]
pub struct ModelOverrides {
    /// Compute dtype; `None` for the dtype of the run.
    pub dtype: Option<Dtype>,
    /// Quantization; `None` as in the run.
    pub quantize: Option<Quantize>,
    /// Chat template; `None` for the template of the run.
    pub chat_template: Option<PathBuf>,
}

/// Outcome of [`CheckpointFollower::reload`].
#[derive(Debug, Default)]
pub struct Reload {
    /// True if the model has new weights.
    pub changed: bool,
    /// Unusable checkpoints; every one is reported once.
    pub problems: Vec<String>,
}

/// Tracks the newest checkpoint of a run, and the checkpoint loaded into a model.
#[derive(Debug)]
pub struct CheckpointFollower {
    run: PathBuf,
    checkpoints: Checkpoints,
    /// Recipe keys that define the loaded model.
    keys: BTreeMap<String, String>,
    /// Loaded checkpoint: step and fingerprint. `None` before the first.
    at: Option<(u64, Vec<u8>)>,
    /// Fingerprints of unusable checkpoints.
    unusable: HashSet<Vec<u8>>,
}

/// Recipe keys that define the model in the checkpoints of a run.
fn model_keys(run: &Path) -> ft_base::Result<BTreeMap<String, String>> {
    let keys = Recipe::load(&run.join("recipe.toml"), &[])?.math_keys();
    let of_model = |k: &str| ["model.", "lora.", "train."].iter().any(|t| k.starts_with(t));
    let of_training = |k: &str| [".lr_scale", ".dropout"].iter().any(|t| k.ends_with(t));
    Ok(keys.into_iter().filter(|(k, _)| of_model(k) && !of_training(k)).collect())
}

impl CheckpointFollower {
    /// Opens the model of a run for inference on the devices passed to [`Job::on`]. Ignores the data of the
    /// run.
    ///
    /// # Errors
    /// As [`Job::open`].
    pub fn open(run: &Path, how: &ModelOverrides) -> ft_base::Result<(Self, Job)> {
        let mut recipe = recipe_of(run)?;
        let keys = model_keys(run)?;
        recipe.run.device = ft_recipe::Device::Cpu;
        // Inference needs neither master weights nor optimizer states.
        recipe.memory.offload.iter_mut().for_each(|all| all.retain(|o| *o == Offload::Activations));
        recipe.optimizer.master = ft_recipe::Master::None;
        if let Some(quantize) = how.quantize {
            recipe.model.quantize = quantize;
            recipe.model.cache = recipe.model.cache.filter(|_| quantize == Quantize::Nf4);
        }
        recipe.model.dtype = how.dtype.or(recipe.model.dtype);
        recipe.data.chat_template = how.chat_template.clone().or(recipe.data.chat_template);
        // Data sources are only needed for their prompt format.
        let (train, _) = (std::mem::take(&mut recipe.data.train), std::mem::take(&mut recipe.data.eval));
        let mut job = Job::open(recipe, Want::Weights, true)?;
        job.recipe.data.train = train;
        Ok((Self::of(run, keys), job))
    }

    fn of(run: &Path, keys: BTreeMap<String, String>) -> Self {
        let checkpoints = Checkpoints::look(&run.join(CHECKPOINTS));
        Self { run: run.into(), checkpoints, keys, at: None, unusable: HashSet::new() }
    }

    /// Tracker for another copy of the same model, without a checkpoint yet.
    pub fn another(&self) -> Self {
        Self::of(&self.run, self.keys.clone())
    }

    /// Step of the loaded checkpoint; 0 before the first.
    pub fn step(&self) -> u64 {
        self.at.as_ref().map_or(0, |(step, _)| *step)
    }

    /// Loads the newest checkpoint, unless already loaded; if the run has ended, the checkpoint of the
    /// result. Retries if a checkpoint is deleted during reading. Reports damaged and foreign checkpoints,
    /// and leaves the model unchanged.
    pub fn reload(&mut self, params: &Params) -> Reload {
        let mut reload = Reload::default();
        // A deleted checkpoint has a newer successor on disk already.
        let _ = (0..TRIES).any(|_| self.reload_once(params, &mut reload));
        reload
    }

    /// As [`CheckpointFollower::reload`], once. Returns false if a checkpoint was deleted during reading.
    fn reload_once(&mut self, params: &Params, reload: &mut Reload) -> bool {
        // The folder does not exist before the run begins.
        let mut steps = self.checkpoints.list().unwrap_or_default();
        if let Some(step) = ended_at(&self.run).filter(|s| steps.contains(s)) {
            steps = vec![step];
        }
        let mut found = Vec::new();
        for step in steps {
            let Some(mark) = self.checkpoints.mark(step) else { return false };
            found.push((step, mark));
        }
        // Forgets deleted checkpoints, so that a new one at the same step gets a chance.
        self.unusable.retain(|u| found.iter().any(|(_, mark)| mark == u));
        let mut passed_over = false;
        for (step, mark) in found.into_iter().rev() {
            let here = self.at.as_ref();
            if here.is_some_and(|(_, m)| *m == mark) || (passed_over && here.is_some_and(|(s, _)| *s > step))
            {
                return true;
            }
            if self.unusable.contains(&mark) {
                passed_over = true;
                continue;
            }
            match self.load(step, params) {
                Ok(()) => {
                    self.at = Some((step, mark));
                    reload.changed = true;
                    return true;
                }
                Err(_) if self.checkpoints.mark(step).as_ref() != Some(&mark) => return false,
                Err(e) => {
                    reload.problems.push(e.to_string());
                    self.unusable.insert(mark);
                    passed_over = true;
                }
            }
        }
        true
    }

    fn load(&self, step: u64, params: &Params) -> ft_base::Result<()> {
        if model_keys(&self.run)? != self.keys {
            let why = "the run folder is that of another run now, which trains another model or something else of it\n  \
                       hint: ft serve, started again, answers with that";
            let path = self.checkpoints.folder(step).display().to_string();
            return Err(crate::train::Error::Checkpoint { path, why: why.into() }.into());
        }
        self.checkpoints.whole_file(step, state::WEIGHTS)?;
        state::load_weights(&self.checkpoints.folder(step), params)
    }
}
