//! Finds the base model of an adapter, and the original of a 4-bit base.

use crate::train::job;
use ft_base::terminal::{tell, warn};
use ft_data::hub::{self, ModelDir, Settings, Want};
use ft_engine::adapt::{self, Adapter};
use ft_engine::files::TensorFiles;
use ft_engine::load::layout;
use ft_engine::model::Config;
use ft_engine::model::modules::modules;
use ft_engine::quant;
use ft_recipe::Quantize;
use serde_json::Map;
use std::path::Path;

/// Key of config.json with the source of a quantized model, as written by `ft quantize` and transformers.
pub(super) const MADE_FROM: &str = "_name_or_path";
/// Smallest share of equal 4-bit codes for a model to count as the original. Codes by bitsandbytes on
/// another device or from f16 differ in some thousandths; after further training many codes differ.
const SAME_CODES: f64 = 0.98;

/// The base named on the command line, or the one named in the adapter's config.
///
/// # Errors
/// A missing base.
pub(super) fn base_of(
    settings: &Settings,
    adapter: &Adapter,
    named: Option<&str>,
    want: Want,
) -> ft_base::Result<ModelDir> {
    let (source, revision) = match (named, adapter.config.base()) {
        (Some(base), _) => (base, None),
        (None, Some(base)) => base,
        (None, None) => {
            let why = "base_model_name_or_path: names no base\n  hint: --base MODEL".to_string();
            return Err(adapt::Error::Peft { file: adapter.config.file.clone(), why }.into());
        }
    };
    let found = hub::fetch_model_with(settings, source, revision.unwrap_or("main"), want, true);
    let model = found.map_err(|e| match (named, e) {
        (None, e @ hub::Error::Missing { .. }) => {
            let why = format!(
                "base_model_name_or_path: {e}\n  hint: --base MODEL, or run it where that path leads to it"
            );
            adapt::Error::Peft { file: adapter.config.file.clone(), why }.into()
        }
        (_, e) => ft_base::Error::from(e),
    })?;
    model.notes.iter().for_each(|n| warn(n));
    Ok(model)
}

/// Whether to quantize the base to NF4 while loading: as the option says, or as in the adapter's
/// training. Prints a message in the latter case.
///
/// # Errors
/// An adapter with unknown quantization metadata.
pub(super) fn quantized(
    option: Option<&str>,
    adapter: Option<&Adapter>,
    config: &Config,
) -> ft_base::Result<bool> {
    let trained = adapter.map_or(Ok(Quantize::None), Adapter::quantize)?;
    let chosen = option.and_then(Quantize::from_word);
    // a 4-bit checkpoint is never quantized again
    if config.four_bit {
        return Ok(false);
    }
    if chosen.is_none() && trained == Quantize::Nf4 {
        tell("the base is loaded in NF4, as it was when the adapter was trained (--quantize none: as it is)");
    }
    Ok(chosen.unwrap_or(trained) == Quantize::Nf4)
}

/// The original of a 4-bit checkpoint if the config names one, verified by quantizing some of its
/// weights.
///
/// # Errors
/// An original that cannot be fetched or does not match, with a hint.
pub(super) fn original(
    settings: &Settings,
    model: &ModelDir,
    config: &Config,
) -> ft_base::Result<Option<ModelDir>> {
    let four = &model.source;
    let hint = "hint: --base MODEL names the original; --onto 4bit merges into the dequantized weights";
    let named = config.raw.get(MADE_FROM).and_then(|v| v.as_str()).unwrap_or_default().to_string();
    if named.is_empty() || named == *four {
        return Ok(None);
    }
    let fail = |why: String| {
        let dir = model.dir.join("config.json").display().to_string();
        ft_base::Error::from(adapt::Error::Merge { dir, why: format!("{why}\n  {hint}") })
    };
    let found = hub::fetch_model_with(settings, &named, "main", Want::Weights, true)
        .map_err(|e| fail(format!("the base is 4-bit, and its original ({MADE_FROM}) cannot be had: {e}")))?;
    if same_folder(&found.dir, &model.dir) {
        return Ok(None);
    }
    found.notes.iter().for_each(|n| warn(n));
    let original = job::config(&found.dir, &Map::new())?;
    if original.four_bit {
        return Err(fail(format!("{MADE_FROM}: {named} is 4-bit too")));
    }
    let (files, theirs) = (layout::open(config, &model.dir)?, layout::open(&original, &found.dir)?);
    if let Some(why) = other_weights(config, &files, &theirs)? {
        return Err(fail(format!("{MADE_FROM}: {named} is not what {four} was made from: {why}")));
    }
    Ok(Some(found))
}

fn same_folder(a: &Path, b: &Path) -> bool {
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
