//! Identity of a run: recipe keys, and hashes of data, model and tokenizer.

use crate::train::job::Job;
use crate::train::job::hash::{adapter_hash, hash_of, model_hash};
use candle_core::DType;
use ft_base::store;
use ft_data::Dataset;
use ft_engine::load::Base;
use ft_recipe::{Method, Products};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// Recipe keys and hashes of a run, computed on first use. Runs with equal identities compute the same
/// result.
pub struct Identity {
    job: Arc<Job>,
    data: Arc<Dataset>,
    /// Hash of another model as reference.
    reference: Option<String>,
    /// Hash of the model, if known already.
    model: OnceLock<String>,
    map: OnceLock<BTreeMap<String, String>>,
}

impl Identity {
    /// Identity of a run of `job` on `data`. `reference` is the hash of another model as reference.
    pub fn new(job: &Arc<Job>, data: &Arc<Dataset>, reference: Option<String>) -> Self {
        let (job, data) = (Arc::clone(job), Arc::clone(data));
        Self { job, data, reference, model: OnceLock::new(), map: OnceLock::new() }
    }

    /// Returns the keys and hashes.
    ///
    /// # Errors
    /// Files are unreadable or change during hashing.
    pub fn get(&self) -> ft_base::Result<&BTreeMap<String, String>> {
        if let Some(map) = self.map.get() {
            return Ok(map);
        }
        let job = &self.job;
        let model = match self.model.get() {
            Some(model) => model.clone(),
            None => model_hash(&job.recipe, &job.config, &job.model.dir)?,
        };
        let mut map = job.recipe.math_keys();
        if job.recipe.optimizer.lr.is_none() {
            // Stores the default learning rates: another default makes another run.
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
        // The resolved value. Runs without this key keep master weights.
        if !job.recipe.optimizer.keeps_master(job.dtype == DType::F32)
            && job.selection.parts().iter().any(|t| t.part.method() == Method::Full)
        {
            map.insert("optimizer.master".into(), "none".into());
        }
        // The only key of [memory] with an effect on numbers.
        if job.recipe.memory.products == Products::Fp8 {
            map.insert("memory.products".into(), "fp8".into());
        }
        if let Some(a) = &job.adapter {
            map.insert("hash.adapter".into(), adapter_hash(&a.dir)?);
        }
        if let Some(reference) = &self.reference {
            map.insert("hash.reference".into(), reference.clone());
        }
        Ok(self.map.get_or_init(|| map))
    }

    /// Prepares for loading the base: if the hash of the model is unknown, files are hashed while they are
    /// read.
    pub fn loading(&self, base: &Base) -> ft_base::Result<()> {
        match base.files() {
            Some(files) if self.map.get().is_none() => Ok(files.hash_while_reading()?),
            _ => Ok(()),
        }
    }

    /// Finishes loading the base: stores the hash of the files read, or compares it with the hash known
    /// before.
    ///
    /// # Errors
    /// [`store::Error::Changed`].
    pub fn loaded(&self, base: &Base) -> ft_base::Result<()> {
        let Some(map) = self.map.get() else {
            let model = hash_of(&self.job.config, base.files())?;
            self.model.get_or_init(|| model);
            return Ok(());
        };
        // Cheap if file hashes are cached.
        if map.get("hash.model")
            == Some(&model_hash(&self.job.recipe, &self.job.config, &self.job.model.dir)?)
        {
            return Ok(());
        }
        let problem = "changed while the run began\n  hint: start again when nothing writes there".into();
        Err(store::Error::Changed { path: self.job.model.dir.clone(), problem }.into())
    }
}

/// The hash of the content at a place; `None` for any other key.
pub(super) fn hash_of_place(key: &str) -> Option<&'static str> {
    match key {
        "model.source" | "model.revision" => Some("hash.model"),
        "lora.init" => Some("hash.adapter"),
        "preference.reference" => Some("hash.reference"),
        _ => {
            let nth = key.strip_prefix("data.train.").and_then(|k| k.strip_suffix(".source"));
            nth.is_some_and(|n| n.parse::<usize>().is_ok()).then_some("hash.data")
        }
    }
}
