//! What makes two runs the same run: recipe keys and hashes of data, model and tokenizer.

use super::Job;
use crate::data::Dataset;
use crate::store;
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Files up to this size are hashed whole; of larger ones, the first and last mebibyte and the size.
const WHOLE: u64 = 256 << 20;
const END: u64 = 1 << 20;

/// Keys and hashes of a run; two runs with equal maps compute the same.
pub fn identity(job: &Job, data: &Dataset) -> crate::Result<BTreeMap<String, String>> {
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
    map.insert("hash.data".into(), data.hash.clone());
    map.insert("hash.model".into(), model_hash(job)?);
    if let Some(t) = &job.tokenizer {
        map.insert("hash.tokenizer".into(), t.hash().into());
    }
    map.insert("compute.dtype".into(), format!("{:?}", job.dtype));
    if let Some(a) = &job.adapter {
        let mut h = blake3::Hasher::new();
        for f in ["adapter_config.json", "adapter_model.safetensors"] {
            hash_file(&mut h, &a.dir.join(f))?;
        }
        map.insert("hash.adapter".into(), h.finalize().to_hex().to_string());
    }
    Ok(map)
}

/// Hash of a model: its config, and what [`hash_file`] takes of its files.
pub(super) fn model_hash(job: &Job) -> Result<String, store::Error> {
    let mut h = blake3::Hasher::new();
    h.update(serde_json::to_string(&job.config.raw).unwrap_or_default().as_bytes());
    if job.recipe.model.weights == crate::recipe::Weights::Load {
        let files = crate::adapt::layout::open(&job.config, &job.model.dir)?;
        let mut paths: Vec<&Path> = files.paths().collect();
        paths.sort();
        for p in paths {
            hash_file(&mut h, p)?;
        }
    }
    Ok(h.finalize().to_hex().to_string())
}

fn hash_file(h: &mut blake3::Hasher, path: &Path) -> Result<(), store::Error> {
    let fail = |e| store::Error::read(path, e);
    let mut f = store::open_plain(path).map_err(fail)?;
    let size = f.metadata().map_err(fail)?.len();
    h.update(&size.to_le_bytes());
    if size <= WHOLE {
        std::io::copy(&mut f, h).map_err(fail)?;
    } else {
        std::io::copy(&mut (&mut f).take(END), h).map_err(fail)?;
        f.seek(SeekFrom::End(-(END as i64))).map_err(fail)?;
        std::io::copy(&mut f, h).map_err(fail)?;
    }
    Ok(())
}
