//! The base that an adapter belongs to: where it is, whether it is 4-bit, and what a 4-bit one was made from.

use ft_engine::adapt::{self, Adapter};
use ft_engine::base::layout;
use ft_data::hub::{self, ModelDir, Settings, Want};
use ft_base::terminal::{tell, warn};
use ft_engine::model::Config;
use ft_engine::model::modules::modules;
use ft_engine::quant;
use ft_recipe::Quantize;
use ft_engine::files::TensorFiles;
use crate::train::job;
use serde_json::Map;
use std::path::Path;

/// The key of config.json that names what a model was made from: `ft quantize` writes it, and transformers did.
pub(super) const MADE_FROM: &str = "_name_or_path";
/// Share of a tensor's 4-bit codes that quantizing its original gives again, at least. bitsandbytes on another device,
/// or from f16, differs in a few of thousands; a model that was trained further, in many.
const SAME_CODES: f64 = 0.98;

/// The base that an adapter was trained on, or the one that was named.
///
/// # Errors
/// A base that cannot be found.
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

/// Whether a base becomes NF4 while it is loaded: as the option says, else as it was when the adapter was trained,
/// and then that is told.
///
/// # Errors
/// An adapter whose metadata has a word that is not known.
pub(super) fn quantized(
    option: Option<&str>,
    adapter: Option<&Adapter>,
    config: &Config,
) -> ft_base::Result<bool> {
    let trained = adapter.map_or(Ok(Quantize::None), Adapter::quantize)?;
    let chosen = option.and_then(Quantize::from_word);
    // a 4-bit checkpoint is what it is
    if config.four_bit {
        return Ok(false);
    }
    if chosen.is_none() && trained == Quantize::Nf4 {
        tell("the base is loaded in NF4, as it was when the adapter was trained (--quantize none: as it is)");
    }
    Ok(chosen.unwrap_or(trained) == Quantize::Nf4)
}

/// The model that a 4-bit checkpoint was made from, if its config names one: found, and its weights compared with the
/// codes, so that no other model is taken for it.
///
/// # Errors
/// A model that cannot be had, or is not the original; each with what to do instead.
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

/// Why a model's weights are not those that a 4-bit checkpoint has codes of; `None` if they are. One linear of each
/// layer is compared.
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
