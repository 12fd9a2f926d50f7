//! What makes two runs the same run: recipe keys and hashes of data, model and tokenizer.

use super::Job;
use crate::base::layout;
use crate::data::Dataset;
use crate::model::Config;
use crate::recipe::Weights;
use crate::store::{self, hash};
use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::path::Path;
use std::thread::JoinHandle;

/// Keys and hashes of a run, made when they are asked for; two runs with equal ones compute the same.
///
/// The model's files are hashed in the background from the beginning: other things are read meanwhile.
pub struct Identity<'a> {
    job: &'a Job,
    data: &'a Dataset,
    model: RefCell<Option<Hashing>>,
    map: OnceCell<BTreeMap<String, String>>,
}

/// A model's hash that is being made.
pub struct Hashing(JoinHandle<Result<String, store::Error>>);

impl Hashing {
    /// Begins with a job's model.
    pub fn begin(job: &Job) -> Option<Self> {
        let (config, dir, weights) = (job.config.clone(), job.model.dir.clone(), job.recipe.model.weights);
        let thread = std::thread::Builder::new().name("hashes".into());
        thread.spawn(move || hash_of(&config, &dir, weights)).ok().map(Self)
    }
}

impl<'a> Identity<'a> {
    /// Of a run of `job` on `data`.
    pub fn new(job: &'a Job, data: &'a Dataset, model: Option<Hashing>) -> Self {
        Self { job, data, model: RefCell::new(model), map: OnceCell::new() }
    }

    /// The keys and hashes.
    ///
    /// # Errors
    /// Files that cannot be read, or that change meanwhile.
    pub fn get(&self) -> crate::Result<&BTreeMap<String, String>> {
        if let Some(map) = self.map.get() {
            return Ok(map);
        }
        let job = self.job;
        let hashing = self.model.take().and_then(|h| h.0.join().ok());
        let model = hashing.unwrap_or_else(|| model_hash(job))?;
        let mut map = job.recipe.math_keys();
        if job.recipe.optimizer.lr.is_none() {
            // what the default is, so that another one is another run
            let rates = job.selection.learning_rates(&job.recipe.optimizer);
            let mut by_method: Vec<String> = rates
                .iter()
                .map(|r| format!("{} {:e}", r.method.word(), r.base(&job.recipe.optimizer)))
                .collect();
            by_method.sort();
            by_method.dedup();
            map.insert("optimizer.lr".into(), format!("(default: {})", by_method.join(", ")));
        }
        map.insert("hash.data".into(), self.data.hash.clone());
        map.insert("hash.model".into(), model);
        if let Some(t) = &job.tokenizer {
            map.insert("hash.tokenizer".into(), t.hash().into());
        }
        map.insert("compute.dtype".into(), format!("{:?}", job.dtype));
        if let Some(a) = &job.adapter {
            let mut h = blake3::Hasher::new();
            for f in ["adapter_config.json", "adapter_model.safetensors"] {
                let (hash, bytes) = hash::of_inside(&a.dir, f)?;
                h.update(&bytes.to_le_bytes()).update(hash.as_bytes());
            }
            map.insert("hash.adapter".into(), h.finalize().to_hex().to_string());
        }
        Ok(self.map.get_or_init(|| map))
    }

    /// Holds the model that was loaded against the one that was hashed.
    ///
    /// # Errors
    /// [`store::Error::Changed`].
    pub fn check_unchanged(&self) -> crate::Result<()> {
        // costs nothing where hashes are kept
        if self.get()?.get("hash.model") == Some(&model_hash(self.job)?) {
            return Ok(());
        }
        let problem = "changed while the run began\n  hint: start again when nothing writes there".into();
        Err(store::Error::Changed { path: self.job.model.dir.clone(), problem }.into())
    }
}

/// Hash of a model: its config, and all bytes of the files of its weights.
pub(super) fn model_hash(job: &Job) -> Result<String, store::Error> {
    hash_of(&job.config, &job.model.dir, job.recipe.model.weights)
}

fn hash_of(config: &Config, dir: &Path, weights: Weights) -> Result<String, store::Error> {
    let mut h = blake3::Hasher::new();
    h.update(serde_json::to_string(&config.raw).unwrap_or_default().as_bytes());
    if weights == Weights::Load {
        for (_, bytes, hash) in layout::open(config, dir)?.hashes()? {
            h.update(&bytes.to_le_bytes()).update(hash.as_bytes());
        }
    }
    Ok(h.finalize().to_hex().to_string())
}
