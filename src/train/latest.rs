//! The newest weights of a run, in a model that only reads: what `ft serve` answers with while the run goes on.

use super::run::CHECKPOINTS;
use super::{Job, state};
use ft_engine::adapt::Params;
use ft_data::hub::Want;
use crate::log::{last_event, read_metrics};
use ft_recipe::{Dtype, Offload, Quantize, Recipe};
use ft_base::store::checkpoint::Checkpoints;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// How often a checkpoint may go while it is read before the next look.
const TRIES: usize = 8;

/// The resolved recipe of a run's folder, its model where the run found it.
///
/// # Errors
/// A recipe that cannot be read.
pub fn recipe_of(run: &Path) -> ft_base::Result<Recipe> {
    let mut recipe = Recipe::load(&run.join("recipe.toml"), &[])?;
    // where the run found it, from the folder that it was started in
    let events = read_metrics(&run.join("metrics.jsonl")).unwrap_or_default();
    let found = events.iter().find_map(|e| e["model"]["source"].as_str());
    if let Some(source) = found.filter(|s| Path::new(s).exists()) {
        recipe.model.source = source.into();
    }
    Ok(recipe)
}

/// What a run's metrics say of its end, where it has ended: its result is its own then, and not an earlier run's or of an
/// earlier step.
pub fn end_of(run: &Path) -> Option<serde_json::Value> {
    last_event(&run.join("metrics.jsonl")).filter(|e| e["event"] == "end")
}

/// The step that the result of a run is of, where the run has ended.
pub fn ended_at(run: &Path) -> Option<u64> {
    end_of(run)?["of_step"].as_u64()
}

/// How the model of a run is loaded to answer.
#[derive(Clone, Debug)]
pub struct Loading {
    /// Compute dtype, where it is not the run's own.
    pub dtype: Option<Dtype>,
    /// Quantization, where it is not the run's own.
    pub quantize: Option<Quantize>,
    /// A chat template in place of the run's.
    pub chat_template: Option<PathBuf>,
}

/// What a look at a run found.
#[derive(Debug, Default)]
pub struct Seen {
    /// Whether other weights answer from here on.
    pub changed: bool,
    /// Checkpoints that cannot be used, each told once.
    pub problems: Vec<String>,
}

/// A run whose newest checkpoint a model has.
#[derive(Debug)]
pub struct Latest {
    run: PathBuf,
    checkpoints: Checkpoints,
    /// What decides which model it is.
    keys: BTreeMap<String, String>,
    /// What the model has: the step, and what tells its checkpoint from any other; before the first there is none.
    at: Option<(u64, Vec<u8>)>,
    /// Checkpoints that cannot be used.
    unusable: HashSet<Vec<u8>>,
}

/// The keys of a run's recipe that decide which model the tensors of its checkpoints belong to.
fn model_keys(run: &Path) -> ft_base::Result<BTreeMap<String, String>> {
    let keys = Recipe::load(&run.join("recipe.toml"), &[])?.math_keys();
    let of_model = |k: &str| ["model.", "lora.", "train."].iter().any(|t| k.starts_with(t));
    let of_training = |k: &str| [".lr_scale", ".dropout"].iter().any(|t| k.ends_with(t));
    Ok(keys.into_iter().filter(|(k, _)| of_model(k) && !of_training(k)).collect())
}

impl Latest {
    /// What a run trains, opened for answering on devices that [`Job::on`] names; its data is not looked for.
    ///
    /// # Errors
    /// As [`Job::open`].
    pub fn open(run: &Path, how: &Loading) -> ft_base::Result<(Self, Job)> {
        let mut recipe = recipe_of(run)?;
        let keys = model_keys(run)?;
        recipe.run.device = ft_recipe::Device::Cpu;
        // of what trains, only what layers compute with is wanted
        recipe.memory.offload.iter_mut().for_each(|all| all.retain(|o| *o == Offload::Activations));
        recipe.optimizer.master = ft_recipe::Master::None;
        if let Some(quantize) = how.quantize {
            recipe.model.quantize = quantize;
            recipe.model.cache = recipe.model.cache.filter(|_| quantize == Quantize::Nf4);
        }
        recipe.model.dtype = how.dtype.or(recipe.model.dtype);
        recipe.data.chat_template = how.chat_template.clone().or(recipe.data.chat_template);
        // how it is asked depends on them, and nothing else
        let (train, _) = (std::mem::take(&mut recipe.data.train), std::mem::take(&mut recipe.data.eval));
        let mut job = Job::open(recipe, Want::Weights, true)?;
        job.recipe.data.train = train;
        Ok((Self::of(run, keys), job))
    }

    fn of(run: &Path, keys: BTreeMap<String, String>) -> Self {
        let checkpoints = Checkpoints::look(&run.join(CHECKPOINTS));
        Self { run: run.into(), checkpoints, keys, at: None, unusable: HashSet::new() }
    }

    /// For another copy of the same model, which has no checkpoint yet.
    pub fn another(&self) -> Self {
        Self::of(&self.run, self.keys.clone())
    }

    /// The step of the checkpoint that answers; 0 before the first.
    pub fn step(&self) -> u64 {
        self.at.as_ref().map_or(0, |(step, _)| *step)
    }

    /// Takes up the newest checkpoint, or of a run that has ended that of its result, where the model has another. One that
    /// goes while it is read is none; one that is damaged or of another model is told, and the model stays as it is.
    pub fn look(&mut self, params: &Params) -> Seen {
        let mut seen = Seen::default();
        // one that goes has made room for another, which is there already
        let _ = (0..TRIES).any(|_| self.look_once(params, &mut seen));
        seen
    }

    /// As [`Latest::look`]; whether nothing has gone meanwhile.
    fn look_once(&mut self, params: &Params, seen: &mut Seen) -> bool {
        // there are none before the run has begun
        let mut steps = self.checkpoints.list().unwrap_or_default();
        if let Some(step) = ended_at(&self.run).filter(|s| steps.contains(s)) {
            steps = vec![step];
        }
        let mut found = Vec::new();
        for step in steps {
            let Some(mark) = self.checkpoints.mark(step) else { return false };
            found.push((step, mark));
        }
        // one that went, and is there again, is looked at again
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
            match self.take(step, params) {
                Ok(()) => {
                    self.at = Some((step, mark));
                    seen.changed = true;
                    return true;
                }
                Err(_) if self.checkpoints.mark(step).as_ref() != Some(&mark) => return false,
                Err(e) => {
                    seen.problems.push(e.to_string());
                    self.unusable.insert(mark);
                    passed_over = true;
                }
            }
        }
        true
    }

    fn take(&self, step: u64, params: &Params) -> ft_base::Result<()> {
        if model_keys(&self.run)? != self.keys {
            let why = "the run folder is that of another run now, which trains another model or something else of it\n  \
                       hint: ft serve, started again, answers with that";
            let path = self.checkpoints.folder(step).display().to_string();
            return Err(super::Error::Checkpoint { path, why: why.into() }.into());
        }
        self.checkpoints.whole_file(step, state::WEIGHTS)?;
        state::load_weights(&self.checkpoints.folder(step), params)
    }
}
