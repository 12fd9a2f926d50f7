//! Hashes of a model and of an adapter.

use ft_base::store;
use ft_engine::files::TensorFiles;
use ft_engine::load::layout;
use ft_engine::model::Config;
use ft_recipe::{Recipe, Weights};
use std::path::Path;

/// Hash of a model: config, and bytes of all weight files in `dir`.
pub fn model_hash(recipe: &Recipe, config: &Config, dir: &Path) -> Result<String, store::Error> {
    let load = recipe.model.weights == Weights::Load;
    let files = load.then(|| layout::open(config, dir)).transpose()?;
    hash_of(config, files.as_ref())
}

/// Hash of a config and opened weight files.
pub fn hash_of(config: &Config, files: Option<&TensorFiles>) -> Result<String, store::Error> {
    let mut h = blake3::Hasher::new();
    h.update(serde_json::to_string(&config.raw).unwrap_or_default().as_bytes());
    for (_, bytes, hash) in files.map(TensorFiles::hashes).transpose()?.unwrap_or_default() {
        h.update(&bytes.to_le_bytes()).update(hash.as_bytes());
    }
    Ok(h.finalize().to_hex().to_string())
}

/// Hash of the files of an adapter.
pub fn adapter_hash(dir: &Path) -> Result<String, store::Error> {
    let mut h = blake3::Hasher::new();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        let (hash, bytes) = store::hash::of_inside(dir, file)?;
        h.update(&bytes.to_le_bytes()).update(hash.as_bytes());
    }
    Ok(h.finalize().to_hex().to_string())
}
