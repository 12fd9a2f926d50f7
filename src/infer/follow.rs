//! The newest weights of a run: `ft serve` answers with them during training.

use super::LoadOptions;
use super::run_folder::{open_without_data, run_recipe};
use crate::train::checkpoint::state;
use crate::train::layout::{CHECKPOINTS, end_of};
use crate::train::{self, Job};
use ft_base::store::checkpoint::Checkpoints;
use ft_base::terminal::{tell, warn};
use ft_engine::params::Params;
use ft_hub::Want;
use ft_recipe::{Offload, Quantize, Recipe};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// Number of attempts if checkpoints are deleted while they are read.
const TRIES: usize = 8;

/// Returns the step of the result, if the run has ended.
pub fn ended_at(run: &Path) -> Option<u64> {
    end_of(run)?["of_step"].as_u64()
}

/// Recipe keys that define the model in the checkpoints of a run.
fn model_keys(run: &Path) -> ft_base::Result<BTreeMap<String, String>> {
    let keys = Recipe::load(&run.join("recipe.toml"), &[])?.math_keys();
    let of_model = |k: &str| ["model.", "lora.", "train."].iter().any(|t| k.starts_with(t));
    let of_training = |k: &str| [".lr_scale", ".dropout"].iter().any(|t| k.ends_with(t));
    Ok(keys.into_iter().filter(|(k, _)| of_model(k) && !of_training(k)).collect())
}

/// A run folder and the model of its checkpoints.
#[derive(Clone, Debug)]
pub struct FollowedRun {
    folder: PathBuf,
    /// Recipe keys that define the loaded model.
    keys: BTreeMap<String, String>,
}

impl FollowedRun {
    /// Opens the model of a run for inference on the devices passed to [`Job::on`]. Ignores the data of the
    /// run.
    ///
    /// # Errors
    /// As [`Job::open`].
    pub fn open(
        folder: &Path,
        options: LoadOptions,
        chat_template: Option<&Path>,
    ) -> ft_base::Result<(Self, Job)> {
        let mut recipe = run_recipe(folder, &[])?;
        let keys = model_keys(folder)?;
        recipe.run.device = ft_recipe::Device::Cpu;
        // Inference needs neither master weights nor optimizer states.
        recipe.memory.offload.iter_mut().for_each(|all| all.retain(|o| *o == Offload::Activations));
        recipe.optimizer.master = ft_recipe::Master::None;
        if let Some(quantize) = options.quantize {
            recipe.model.quantize = quantize;
            recipe.model.cache = recipe.model.cache.filter(|_| quantize == Quantize::Nf4);
        }
        recipe.model.dtype = options.dtype.or(recipe.model.dtype);
        recipe.data.chat_template = chat_template.map(PathBuf::from).or(recipe.data.chat_template);
        let job = open_without_data(recipe, Want::Weights, true)?;
        Ok((Self { folder: folder.into(), keys }, job))
    }

    /// Follows the run with one copy of the model, without a checkpoint yet. `on` is the device suffix for
    /// messages.
    pub fn follower(&self, params: Params, on: String) -> Follower {
        let checkpoints = Checkpoints::look(&self.folder.join(CHECKPOINTS));
        Follower { run: self.clone(), checkpoints, params, loaded: None, unusable: HashSet::new(), on }
    }
}

/// A copy of the model, with the newest checkpoint of a run loaded.
pub struct Follower {
    run: FollowedRun,
    checkpoints: Checkpoints,
    params: Params,
    /// Loaded checkpoint: step and fingerprint. `None` before the first.
    loaded: Option<(u64, Vec<u8>)>,
    /// Fingerprints of unusable checkpoints.
    unusable: HashSet<Vec<u8>>,
    /// Device suffix for messages; empty with a single copy.
    on: String,
}

impl Follower {
    /// Step of the loaded weights; 0 before the first checkpoint.
    pub fn step(&self) -> u64 {
        self.loaded.as_ref().map_or(0, |(step, _)| *step)
    }

    /// Loads the newest checkpoint, unless already loaded; if the run has ended, the checkpoint of the
    /// result. Retries if a checkpoint is deleted during reading. Reports damaged and foreign checkpoints,
    /// and leaves the model unchanged. Returns whether the weights changed.
    pub fn poll(&mut self) -> bool {
        let mut problems = Vec::new();
        // A deleted checkpoint has a newer successor on disk already.
        let changed = (0..TRIES).find_map(|_| self.poll_once(&mut problems)).unwrap_or(false);
        let (step, on) = (self.step(), &self.on);
        if changed {
            tell(&format!("step {step} answers{on}"));
        }
        let current = if step == 0 { "the base".into() } else { format!("step {step}") };
        for problem in problems {
            warn(&format!("not taken up, and {current} answers{on}: {problem}"));
        }
        changed
    }

    /// As [`Follower::poll`], once; appends the problems of unusable checkpoints. `None` if a checkpoint was deleted
    /// during reading.
    fn poll_once(&mut self, problems: &mut Vec<String>) -> Option<bool> {
        // The folder does not exist before the run begins.
        let mut steps = self.checkpoints.list().unwrap_or_default();
        if let Some(step) = ended_at(&self.run.folder).filter(|s| steps.contains(s)) {
            steps = vec![step];
        }
        let mut found = Vec::new();
        for step in steps {
            found.push((step, self.checkpoints.mark(step)?));
        }
        // Forgets deleted checkpoints, so that a new one at the same step gets a chance.
        self.unusable.retain(|u| found.iter().any(|(_, mark)| mark == u));
        let mut passed_over = false;
        for (step, mark) in found.into_iter().rev() {
            let loaded = self.loaded.as_ref();
            if loaded.is_some_and(|(s, m)| *m == mark || (passed_over && *s > step)) {
                return Some(false);
            }
            if self.unusable.contains(&mark) {
                passed_over = true;
                continue;
            }
            match self.load(step) {
                Ok(()) => {
                    self.loaded = Some((step, mark));
                    return Some(true);
                }
                Err(_) if self.checkpoints.mark(step).as_ref() != Some(&mark) => return None,
                Err(e) => {
                    problems.push(e.to_string());
                    self.unusable.insert(mark);
                    passed_over = true;
                }
            }
        }
        Some(false)
    }

    fn load(&self, step: u64) -> ft_base::Result<()> {
        let folder = self.checkpoints.folder(step);
        if model_keys(&self.run.folder)? != self.run.keys {
            let why = "the run folder is that of another run now, which trains another model or something else of \
                       it\n  hint: ft serve, started again, answers with that";
            let path = folder.display().to_string();
            return Err(train::Error::Checkpoint { path, why: why.into() }.into());
        }
        self.checkpoints.whole_file(step, state::WEIGHTS)?;
        state::load_weights(&folder, &self.params)
    }
}
