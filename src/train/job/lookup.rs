//! Parts of a recipe: model folder, config, tokenizer, adapter, selection, prompt.

use crate::train::Error;
use candle_core::DType;
use ft_base::terminal::{tell, warn};
use ft_data::{Added, PromptFormat, Tokenizer};
use ft_engine::adapters::Adapter;
use ft_engine::adapters::Selection;
use ft_engine::model::Config;
use ft_hub::{ModelDir, Settings, Want};
use ft_plan::resolve;
use ft_recipe::{Facts, Quantize, Recipe, Token, Weights};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::Path;

/// Finds the folder of the model, and downloads missing files as far as `want` requires.
pub fn model(settings: &Settings, recipe: &Recipe, want: Want, progress: bool) -> ft_base::Result<ModelDir> {
    // Random weights replace the weight files.
    let random = recipe.model.weights == Weights::Random;
    let want = if random { want.min(Want::Tokenizer) } else { want };
    let source = resolve::source_path(recipe, &recipe.model.source);
    let model = ft_hub::fetch_model_with(settings, &source, &recipe.model.revision, want, progress)?;
    model.notes.iter().for_each(|n| warn(n));
    Ok(model)
}

/// Reads the config of a model folder and applies overrides. Warns about unknown keys and keys without effect.
///
/// # Errors
/// Invalid config, or an unsupported model family.
pub fn config(dir: &Path, overrides: &Map<String, Value>) -> ft_base::Result<Config> {
    let config = Config::load(dir, overrides)?;
    let file = dir.join("config.json").display().to_string();
    resolve::config_notes(&config, &file).iter().for_each(|n| warn(n));
    Ok(config)
}

/// Loads the tokenizer of a model folder, with the chat template of the recipe, and with the added tokens
/// of recipe and adapter. Returns `None` if the folder has no tokenizer.
pub fn tokenizer(
    recipe: &Recipe,
    dir: &Path,
    adapter: Option<&Adapter>,
) -> ft_base::Result<Option<Tokenizer>> {
    let template = recipe.data.chat_template.as_ref().map(|p| recipe.resolve(&p.display().to_string()));
    let rules = recipe.train.iter().filter(|r| r.is_of_tokens());
    let texts = rules.flat_map(|r| r.tokens.iter().flatten()).filter_map(|t| match t {
        Token::Text(text) => Some(text.as_str()),
        Token::Id(_) => None,
    });
    let tokenizer = tokenizer_of((dir, adapter), template.as_deref(), texts)?;
    if let Some((name, why)) = tokenizer.as_ref().and_then(|t| unread_variable(t, &recipe.data.template)) {
        let key = format!("data.template.{name}");
        return Err(Error::at(recipe, &key, format!("{key}: {why}")).into());
    }
    if let Some((_, tokens)) = tokenizer.as_ref().and_then(Tokenizer::with_added) {
        let each: Vec<String> = tokens.iter().map(|(text, id)| format!("{text:?} (token {id})")).collect();
        tell(&format!("tokens beside the model's own: {}", each.join(", ")));
    }
    Ok(tokenizer)
}

/// The first given variable not read by the chat template, and the reason with a hint.
pub fn unread_variable<'v>(
    tokenizer: &Tokenizer,
    given: &'v Map<String, Value>,
) -> Option<(&'v str, String)> {
    let (name, known) = tokenizer.unread(given)?;
    let why = match ft_recipe::nearest(name, known) {
        _ if Tokenizer::sets(name) => "each conversation sets it itself\n  hint: leave it out".to_string(),
        Some(near) => {
            format!("the chat template has no variable of this name\n  hint: {near:?} is one of its own")
        }
        None => "the chat template has no variable of this name".to_string(),
    };
    Some((name, why))
}

/// Loads the tokenizer of a model folder, with `template`, if given, in place of the folder's chat template, the tokens
/// added by an adapter, and `texts` as further tokens. Warns about trained tokens missing from it.
pub fn tokenizer_of<'a>(
    (dir, adapter): (&Path, Option<&Adapter>),
    template: Option<&Path>,
    texts: impl IntoIterator<Item = &'a str>,
) -> ft_base::Result<Option<Tokenizer>> {
    let adapter = adapter.filter(|a| a.config.trains_tokens());
    let added = adapter.map_or_else(|| Ok(Added::default()), |a| Added::of_adapter(&a.dir))?;
    let tokenizer = Tokenizer::load_with(dir, template, &added.and(texts))?;
    if let (Some(a), Some(t)) = (adapter, &tokenizer) {
        let ids: BTreeSet<u32> = a.config.tokens().iter().flat_map(|(_, ids)| ids.iter().copied()).collect();
        let unknown: Vec<String> =
            ids.into_iter().filter(|id| !t.has(*id)).map(|id| id.to_string()).collect();
        if !unknown.is_empty() {
            warn(&format!(
                "{}: trainable_token_indices: no tokenizer has the tokens {}\n  hint: put the tokenizer.json that the \
                 adapter was trained with beside it",
                a.config.file,
                unknown.join(", "),
            ));
        }
    }
    Ok(tokenizer)
}

/// Opens the adapter named in `lora.init`, and downloads it if necessary.
pub fn adapter(settings: &Settings, recipe: &Recipe, progress: bool) -> ft_base::Result<Option<Adapter>> {
    resolve::adapter_dir(settings, recipe, progress)?.map(|dir| Adapter::open(&dir)).transpose()
}

/// Warns if an adapter was trained with another `model.quantize` than the recipe's.
pub fn tell_quantize(recipe: &Recipe, config: &Config, there: Quantize) {
    let here = recipe.model.quantize;
    // a 4-bit checkpoint is never quantized again
    if here != there && !config.is_bitsandbytes() {
        let (here, there) = (here.word(), there.word());
        warn(&format!("the adapter was trained with model.quantize = {there:?}, and here it is {here:?}"));
    }
}

/// As [`tell_quantize`], for an adapter to train further, if it was trained on NF4. Adapters of other programs do not
/// record the quantization of their base.
pub fn tell_init_quantize(recipe: &Recipe, config: &Config, adapter: &Adapter) -> ft_base::Result<()> {
    if adapter.quantize()? == Quantize::Nf4 {
        tell_quantize(recipe, config, Quantize::Nf4);
    }
    Ok(())
}

/// Selects the trained modules by the rules of the recipe, or, without rules, as in the adapter. Warns
/// about rules without a match in the model.
///
/// # Errors
/// Rules or adapter do not fit the model; nothing is selected.
pub fn selection(recipe: &Recipe, config: &Config, adapter: Option<&Adapter>) -> ft_base::Result<Selection> {
    let frozen = || Ok(Selection::frozen(config));
    let selection =
        resolve::selection(recipe, config, || adapter.map_or_else(frozen, |a| a.selection(config)))?;
    selection.notes.iter().for_each(|n| warn(n));
    Ok(selection)
}

/// Looks up the tokens named by a rule. Warns about one without a gradient.
pub fn token_rows(
    selection: &mut Selection,
    config: &Config,
    tokenizer: Option<&Tokenizer>,
) -> ft_base::Result<()> {
    let told = selection.notes.len();
    selection.look_up(config, tokenizer)?;
    selection.notes.iter().skip(told).for_each(|n| warn(n));
    Ok(())
}

/// Warns about keys without effect; `compute` is whether on CUDA, and the dtype.
pub fn tell_idle(recipe: &Recipe, compute: Option<(bool, DType)>, config: Option<&Config>, resolved: bool) {
    let facts = Facts {
        cuda: compute.map(|(cuda, _)| cuda),
        in_f32: compute.map(|(_, dtype)| dtype == DType::F32),
        four_bit: config.map(Config::holds_4bit),
        is_folder: Some(recipe.resolve(&recipe.model.source).is_dir()),
        resolved,
    };
    recipe.warnings(facts).iter().for_each(|w| warn(w));
}

/// Tokenizes the prompts of `log.samples` in the same format as the training data.
///
/// # Errors
/// Tokenizer missing; empty prompt.
pub fn samples(recipe: &Recipe, tokenizer: Option<&Tokenizer>) -> ft_base::Result<Vec<Vec<u32>>> {
    if recipe.log.samples.is_empty() {
        return Ok(Vec::new());
    }
    let fail = |why: &str| Error::at(recipe, "log.samples", format!("log.samples: {why}"));
    let Some(tokenizer) = tokenizer else {
        let why = "the model has no tokenizer.json, so it cannot be asked\n  hint: leave it out";
        return Err(fail(why).into());
    };
    let form = PromptFormat::of(&recipe.data.train, Some(tokenizer));
    let tokens = |prompt: &String| -> ft_base::Result<Vec<u32>> {
        let ids = form.prompt(tokenizer, None, prompt, &recipe.data.template)?;
        if ids.is_empty() {
            return Err(fail("a prompt is empty\n  hint: a text to go on from").into());
        }
        Ok(ids)
    };
    recipe.log.samples.iter().map(tokens).collect()
}
