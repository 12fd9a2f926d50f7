//! The 4-bit copy of a model in `model.cache`.

use super::hash::model_hash;
use crate::train::layout::is_of_model;
use ft_base::store::{self, AtomicFolder, hash};
use ft_base::terminal::{tell, warn};
use ft_engine::files::{FileHash, TensorFiles};
use ft_engine::load::{CACHE_MARKER, layout, quantize_into};
use ft_engine::model::Config;
use ft_engine::quant::Error;
use ft_recipe::{Quantize, Recipe, Weights};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::io::ErrorKind;
use std::path::Path;

/// Contents of [`CACHE_MARKER`]: source and files of a cache.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Marker {
    version: u32,
    #[serde(rename = "type")]
    kind: String,
    double: bool,
    /// Hash of the source model.
    source: String,
    /// Name, size and BLAKE3 hash of config and weight files, sorted.
    files: Vec<FileHash>,
}

/// The 4-bit copy of a model, loaded from the hashed files.
type Cached = (Config, TensorFiles);

/// State of a cache folder.
enum CacheState {
    /// A whole copy of this model.
    Whole(Box<Cached>),
    /// A modified or truncated cache, with the reason.
    Damaged(String),
    /// No cache, or a cache of another model or version.
    Missing,
}

impl Marker {
    /// Marker for a new cache, with an empty list of files.
    fn new(source: String) -> Self {
        Self { version: 2, kind: "nf4".into(), double: true, source, files: Vec::new() }
    }

    /// Opens the cache in a folder if it was made from this model.
    ///
    /// # Errors
    /// A folder with other contents.
    fn find(&self, dir: &Path, overrides: &Map<String, Value>) -> ft_base::Result<CacheState> {
        // One listing is of one folder: another process may put the cache there at any moment.
        let names =
            std::fs::read_dir(dir).map(|all| all.flatten().map(|e| e.file_name()).collect::<Vec<_>>());
        let has_marker = match &names {
            Ok(names) if names.is_empty() => return Ok(CacheState::Missing),
            Ok(names) => names.iter().any(|n| n == CACHE_MARKER),
            Err(e) if e.kind() == ErrorKind::NotFound && !dir.is_symlink() => return Ok(CacheState::Missing),
            Err(_) => false,
        };
        if !has_marker {
            let why = format!(
                "is not empty and has no {CACHE_MARKER}\n  hint: model.cache names a folder of its own"
            );
            return Err(Error::Folder { dir: dir.display().to_string(), why }.into());
        }
        let bytes = match store::read_inside(dir, CACHE_MARKER, MARKER_BYTES) {
            Ok(bytes) => bytes,
            Err(e) => return Ok(CacheState::Damaged(e.to_string())),
        };
        let Ok(made) = serde_json::from_slice::<Value>(&bytes) else {
            return Ok(CacheState::Damaged(format!("{CACHE_MARKER} is not what was written")));
        };
        let own = json!(self);
        if ["version", "type", "double", "source"].iter().any(|key| made[*key] != own[*key]) {
            return Ok(CacheState::Missing);
        }
        let Ok(made) = serde_json::from_value::<Marker>(made) else {
            return Ok(CacheState::Damaged(format!("{CACHE_MARKER} is not what was written")));
        };
        Ok(match open_copy(dir, overrides) {
            Ok((copy, files)) if files == made.files => CacheState::Whole(Box::new(copy)),
            Ok((_, files)) => {
                let wrong = files.iter().find(|f| !made.files.contains(f)).map_or("a file", |f| f.0.as_str());
                CacheState::Damaged(format!("{wrong} is not what was written (its hash differs)"))
            }
            Err(e) => CacheState::Damaged(e.to_string()),
        })
    }
}

/// Maximum size of a marker, with one line per weight file.
const MARKER_BYTES: u64 = 16 << 20;

/// Opens a copy and hashes the files.
fn open_copy(dir: &Path, overrides: &Map<String, Value>) -> ft_base::Result<(Cached, Vec<FileHash>)> {
    const CONFIG: &str = "config.json";
    let (hash, bytes) = hash::of_inside(dir, CONFIG)?;
    let config = Config::load(dir, overrides)?;
    let files = layout::open(&config, dir)?;
    let mut all = files.hashes()?;
    all.push((CONFIG.into(), bytes, hash));
    all.sort();
    Ok(((config, files), all))
}

/// Opens the 4-bit copy of the model in `model.cache`. Writes it first if missing, damaged, or of another model.
/// Returns `None` without a cache in the recipe or if nothing is quantized. With several processes, one writes and the
/// others wait.
pub(super) fn open_or_write(
    recipe: &Recipe,
    config: &Config,
    model: &Path,
) -> ft_base::Result<Option<Cached>> {
    let m = &recipe.model;
    let Some(dir) = &m.cache else { return Ok(None) };
    if m.quantize == Quantize::None || m.weights == Weights::Random || config.holds_4bit() {
        return Ok(None);
    }
    let dir = recipe.resolve(&dir.to_string_lossy());
    let shown = dir.display();
    // Removes drafts of killed processes.
    AtomicFolder::sweep_beside(&dir);
    let mut made = Marker::new(model_hash(recipe, config, model)?);
    if let CacheState::Whole(copy) = made.find(&dir, &m.overrides)? {
        return Ok(Some(*copy));
    }
    let new = AtomicFolder::begin_waiting(&dir, &|holder| {
        let who = holder.map_or(String::new(), |h| format!(" ({h})"));
        tell(&format!("waiting for another ft process{who}, which is writing {shown}"));
    })?;
    match made.find(&dir, &m.overrides)? {
        CacheState::Whole(copy) => return Ok(Some(*copy)),
        CacheState::Damaged(why) => warn(&format!("{shown}: {why}\n  it is made again from the model")),
        CacheState::Missing => {}
    }
    let report = quantize_into(config, model, &new.path(), true)?;
    let (copy, files) = open_copy(&new.path(), &m.overrides)?;
    made.files = files;
    store::write_json(&new.path().join(CACHE_MARKER), &made)?;
    new.replace(&is_of_model)?;
    tell(&format!("{} linears in 4 bits are kept in {shown}", report.linears));
    Ok(Some(copy))
}

#[cfg(test)]
#[path = "cache_4bit_tests.rs"]
mod tests;
