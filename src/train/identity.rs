//! What makes two runs the same run: recipe keys and hashes of data, model and tokenizer.

use super::Job;
use crate::data::Dataset;
use crate::store::{self, hash};
use std::collections::BTreeMap;

/// Keys and hashes of a run; two runs with equal maps compute the same.
pub fn identity(job: &Job, data: &Dataset) -> crate::Result<BTreeMap<String, String>> {
    let mut map = job.recipe.math_keys();
    map.insert("hash.data".into(), data.hash.clone());
    map.insert("hash.model".into(), model_hash(job)?);
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
    Ok(map)
}

/// Hash of a model: its config, and all bytes of the files of its weights.
pub(super) fn model_hash(job: &Job) -> Result<String, store::Error> {
    let mut h = blake3::Hasher::new();
    h.update(serde_json::to_string(&job.config.raw).unwrap_or_default().as_bytes());
    if job.recipe.model.weights == crate::recipe::Weights::Load {
        for (_, bytes, hash) in crate::adapt::layout::open(&job.config, &job.model.dir)?.hashes()? {
            h.update(&bytes.to_le_bytes()).update(hash.as_bytes());
        }
    }
    Ok(h.finalize().to_hex().to_string())
}
