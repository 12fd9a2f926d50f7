//! What makes two runs the same run: recipe keys and hashes of data, model and tokenizer.

use super::Job;
use ft_engine::base::{Base, layout};
use ft_data::Dataset;
use ft_engine::model::Config;
use ft_recipe::{Method, Weights};
use ft_base::store::{self, hash};
use ft_engine::files::TensorFiles;
use candle_core::DType;
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// Keys and hashes of a run, made when they are asked for; two runs with equal ones compute the same.
pub struct Identity<'a> {
    job: &'a Job,
    data: &'a Dataset,
    /// The model's hash, if it is known.
    model: OnceLock<String>,
    map: OnceLock<BTreeMap<String, String>>,
}

impl<'a> Identity<'a> {
    /// Of a run of `job` on `data`.
    pub fn new(job: &'a Job, data: &'a Dataset) -> Self {
        Self { job, data, model: OnceLock::new(), map: OnceLock::new() }
    }

    /// The keys and hashes.
    ///
    /// # Errors
    /// Files that cannot be read, or that change meanwhile.
    pub fn get(&self) -> ft_base::Result<&BTreeMap<String, String>> {
        if let Some(map) = self.map.get() {
            return Ok(map);
        }
        let job = self.job;
        let model = match self.model.get() {
            Some(model) => model.clone(),
            None => model_hash(job)?,
        };
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
        // as it is resolved; without the key every run had them
        if !job.recipe.optimizer.keeps_master(job.dtype == DType::F32)
            && job.selection.parts().iter().any(|t| t.part.method() == Method::Full)
        {
            map.insert("optimizer.master".into(), "none".into());
        }
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

    /// The base is about to be loaded: where the model's hash is not known yet, it is made of what is read.
    ///
    /// # Errors
    /// Files that cannot be read any more.
    pub fn loading(&self, base: &Base) -> ft_base::Result<()> {
        match base.files() {
            Some(files) if self.map.get().is_none() => Ok(files.hash_while_reading()?),
            _ => Ok(()),
        }
    }

    /// The base was loaded: the model's hash is its, or it was hashed before and must be the same still.
    ///
    /// # Errors
    /// [`store::Error::Changed`].
    pub fn loaded(&self, base: &Base) -> ft_base::Result<()> {
        let Some(map) = self.map.get() else {
            let model = hash_of(&self.job.config, base.files())?;
            self.model.get_or_init(|| model);
            return Ok(());
        };
        // costs nothing where hashes are kept
        if map.get("hash.model") == Some(&model_hash(self.job)?) {
            return Ok(());
        }
        let problem = "changed while the run began\n  hint: start again when nothing writes there".into();
        Err(store::Error::Changed { path: self.job.model.dir.clone(), problem }.into())
    }
}

/// Whether a key of an identity says no more than where data are: what they hold is in `hash.data`.
pub(super) fn is_place(key: &str) -> bool {
    let nth = key.strip_prefix("data.train.").and_then(|k| k.strip_suffix(".source"));
    nth.is_some_and(|n| n.parse::<usize>().is_ok())
}

/// Hash of a model: its config, and all bytes of the files of its weights.
pub(super) fn model_hash(job: &Job) -> Result<String, store::Error> {
    let files = match job.recipe.model.weights {
        Weights::Load => Some(layout::open(&job.config, &job.model.dir)?),
        Weights::Random => None,
    };
    hash_of(&job.config, files.as_ref())
}

fn hash_of(config: &Config, files: Option<&TensorFiles>) -> Result<String, store::Error> {
    let mut h = blake3::Hasher::new();
    h.update(serde_json::to_string(&config.raw).unwrap_or_default().as_bytes());
    for (_, bytes, hash) in files.map(TensorFiles::hashes).transpose()?.unwrap_or_default() {
        h.update(&bytes.to_le_bytes()).update(hash.as_bytes());
    }
    Ok(h.finalize().to_hex().to_string())
}
