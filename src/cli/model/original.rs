//! The original of a 4-bit base.

use crate::infer::base::fetch_model;
use crate::train::job;
use ft_engine::adapters;
use ft_engine::files::TensorFiles;
use ft_engine::load::layout;
use ft_engine::model::Config;
use ft_engine::model::modules::modules;
use ft_engine::quant;
use ft_hub::{ModelDir, Want};
use serde_json::Map;
use std::path::Path;

/// Key of config.json with the source of a quantized model, as written by `ft quantize` and transformers.
pub(super) const SOURCE_KEY: &str = "_name_or_path";
/// Smallest share of equal 4-bit codes for a model to count as the original. Codes by bitsandbytes on
/// another device or from f16 differ in some thousandths; after further training many codes differ.
const SAME_CODES: f64 = 0.98;

/// The original of a 4-bit checkpoint if the config names one, verified by quantizing some of its
/// weights.
///
/// # Errors
/// An original that cannot be fetched or does not match, with a hint.
pub(super) fn original(model: &ModelDir, config: &Config) -> ft_base::Result<Option<ModelDir>> {
    let four = &model.source;
    let hint = "hint: --base MODEL names the original; --onto 4bit merges into the dequantized weights";
    let named = config.raw.get(SOURCE_KEY).and_then(|v| v.as_str()).unwrap_or_default().to_string();
    if named.is_empty() || named == *four {
        return Ok(None);
    }
    let fail = |why: String| {
        let file = model.dir.join("config.json").display().to_string();
        ft_base::Error::from(adapters::Error::Peft { file, why: format!("{why}\n  {hint}") })
    };
    let found = fetch_model(&named, "main", Want::Weights).map_err(|e| {
        fail(format!("the base is 4-bit, and its original ({SOURCE_KEY}) cannot be had: {e}"))
    })?;
    if same_folder(&found.dir, &model.dir) {
        return Ok(None);
    }
    let original = job::config(&found.dir, &Map::new())?;
    if original.holds_4bit() {
        return Err(fail(format!("{SOURCE_KEY}: {named} is 4-bit too")));
    }
    let (files, theirs) = (layout::open(config, &model.dir)?, layout::open(&original, &found.dir)?);
    if let Some(why) = other_weights(config, &files, &theirs)? {
        return Err(fail(format!("{SOURCE_KEY}: {named} is not what {four} was made from: {why}")));
    }
    Ok(Some(found))
}

/// Whether two paths lead to one folder.
pub(super) fn same_folder(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Why the weights do not match the codes of a 4-bit checkpoint; `None` if they do. Compares one linear
/// per layer.
fn other_weights(
    config: &Config,
    four: &TensorFiles,
    original: &TensorFiles,
) -> ft_base::Result<Option<String>> {
    let mut last = None;
    for m in modules(config) {
        let name = format!("{}.weight", m.name);
        if m.layer == last || quant::find(four, &name).is_none() {
            continue;
        }
        last = m.layer;
        let [o, i] = m.weight_shape()[..] else { continue };
        match original.info(&name) {
            Some(info) if info.shape == [o, i] => {}
            _ => return Ok(Some(format!("{name}: it has no such tensor of [{o}, {i}]"))),
        }
        let same = quant::agreement(four, original, &name, (o, i))?;
        if same < SAME_CODES {
            return Ok(Some(format!("{name}: {:.0}% of the 4-bit codes agree", 100.0 * same)));
        }
    }
    Ok(None)
}
