//! Finds a model's config without weights: a local folder, the hub's cache, or a built-in one.

use ft_engine::model::{self, Config};
use ft_hub::{Settings, Want};
use ft_recipe::Recipe;
use serde_json::{Map, Value};
use std::path::PathBuf;

macro_rules! builtin {
    ($($ids:expr => $file:literal),* $(,)?) => {
        &[$(($ids, concat!($file, ".json"), include_str!(concat!("configs/", $file, ".json")))),*]
    };
}

/// Published configs of common models, to plan their recipes offline. Fields without effect on memory (initialization,
/// zero dropout) are left out; names on one line share one config.
const BUILTIN: &[(&[&str], &str, &str)] = builtin![
    &["Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-Base"] => "qwen3-0.6b",
    &["Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B-Base"] => "qwen3-1.7b",
    &["Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Base", "Qwen/Qwen3-4B-Instruct-2507"] => "qwen3-4b",
    &["Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base"] => "qwen3-8b",
    &["Qwen/Qwen3-14B", "Qwen/Qwen3-14B-Base"] => "qwen3-14b",
    &["Qwen/Qwen3-32B"] => "qwen3-32b",
    &["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Base", "Qwen/Qwen3-30B-A3B-Instruct-2507"] => "qwen3-30b-a3b",
    &["Qwen/Qwen3-235B-A22B"] => "qwen3-235b-a22b",
    &["Qwen/Qwen3.5-9B"] => "qwen3.5-9b",
    &["Qwen/Qwen3.5-27B"] => "qwen3.5-27b",
    &["Qwen/Qwen3.5-35B-A3B"] => "qwen3.5-35b-a3b",
    &["Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct"] => "qwen2.5-7b",
    &["Qwen/Qwen2-72B", "Qwen/Qwen2-72B-Instruct"] => "qwen2-72b",
    &["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B",
      "meta-llama/Meta-Llama-3.1-8B-Instruct"] => "llama-3.1-8b",
    &["meta-llama/Llama-3.1-405B", "meta-llama/Llama-3.1-405B-Instruct"] => "llama-3.1-405b",
    &["meta-llama/Meta-Llama-3-70B", "meta-llama/Meta-Llama-3-70B-Instruct"] => "llama-3-70b",
    &["meta-llama/Llama-3.3-70B-Instruct"] => "llama-3.3-70b",
    &["mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"] => "mixtral-8x7b",
    &["openai/gpt-oss-20b"] => "gpt-oss-20b",
    &["openai/gpt-oss-120b"] => "gpt-oss-120b",
    &["google/gemma-3-4b-it", "google/gemma-3-4b-pt"] => "gemma-3-4b",
    &["google/gemma-3-12b-it", "google/gemma-3-12b-pt"] => "gemma-3-12b",
    &["google/gemma-3-27b-it", "google/gemma-3-27b-pt"] => "gemma-3-27b",
    &["google/gemma-4-E2B-it", "google/gemma-4-E2B"] => "gemma-4-e2b",
    &["google/gemma-4-E4B-it", "google/gemma-4-E4B"] => "gemma-4-e4b",
    &["google/gemma-4-31B-it", "google/gemma-4-31B"] => "gemma-4-31b",
    &["google/gemma-4-26B-A4B-it", "google/gemma-4-26B-A4B"] => "gemma-4-26b-a4b",
];

/// File name and text of a built-in config.
pub fn builtin(id: &str) -> Option<(&'static str, &'static str)> {
    BUILTIN.iter().find(|(ids, ..)| ids.contains(&id)).map(|(_, file, text)| (*file, *text))
}

/// Built-in config of a recipe's model with the recipe's overrides, and the config's name; `None` without one.
///
/// # Errors
/// Invalid overrides.
pub fn built_in(m: &ft_recipe::Model) -> Result<Option<(Config, String)>, model::Error> {
    let Some((file, text)) = builtin(&m.source) else { return Ok(None) };
    let name = format!("built-in {file}");
    let raw: Map<String, Value> = serde_json::from_str(text)
        .map_err(|e| model::Error::Syntax { file: name.clone(), why: e.to_string() })?;
    Ok(Some((Config::overridden(&name, raw, &m.overrides)?, name)))
}

/// A config and its origin.
#[derive(Debug)]
pub struct Found {
    /// Config with the recipe's overrides applied.
    pub config: Config,
    /// Origin in words: the folder, or "built-in ...".
    pub from: String,
    /// Folder of the config; `None` if built in.
    pub dir: Option<PathBuf>,
    /// Whether the weights are already on this machine.
    pub weights: bool,
    /// Warnings: config keys unknown or without effect, modules named by `[[train]]` rules but absent from the model.
    pub notes: Vec<String>,
}

/// Finds the config of a recipe's model. Contacts the hub only if no local copy or built-in config
/// exists.
///
/// # Errors
/// A model found nowhere; an unsupported config.
pub fn find(recipe: &Recipe) -> ft_base::Result<Found> {
    let m = &recipe.model;
    let source = source_path(recipe, &m.source);
    let settings = Settings { offline: true, ..Settings::from_env() };
    match ft_hub::fetch_model_with(&settings, &source, &m.revision, Want::Config, false) {
        Ok(found) => {
            let weights =
                ft_hub::fetch_model_with(&settings, &source, &m.revision, Want::Weights, false).is_ok();
            return Found::in_folder(found.dir, m, weights);
        }
        Err(ft_hub::Error::NotCached { .. } | ft_hub::Error::WithoutHub { .. }) => {}
        Err(e) => return Err(e.into()),
    }
    if let Some((config, from)) = built_in(m)? {
        return Ok(Found { config, from, dir: None, weights: false, notes: Vec::new() });
    }
    let found = ft_hub::fetch_model(&source, &m.revision, Want::Config, false)?;
    Found::in_folder(found.dir, m, false)
}

impl Found {
    fn in_folder(dir: PathBuf, m: &ft_recipe::Model, weights: bool) -> ft_base::Result<Self> {
        let config = Config::load(&dir, &m.overrides)?;
        let notes = config_notes(&config, &dir.join("config.json").display().to_string());
        Ok(Self { config, from: dir.display().to_string(), dir: Some(dir), weights, notes })
    }
}

/// Resolves a model source to an existing path, or returns it unchanged as a hub id.
pub fn source_path(recipe: &Recipe, written: &str) -> String {
    let path = recipe.resolve(written);
    if path.exists() { path.display().to_string() } else { written.into() }
}

/// Warnings about unknown keys of a config and keys without effect; `file` is its path.
pub fn config_notes(config: &Config, file: &str) -> Vec<String> {
    let unknown = config.unknown.iter();
    let unknown = unknown.map(|key| format!("{file}: {key}: ft does not know this key and leaves it alone"));
    unknown.chain(config.notes.iter().map(|note| format!("{file}: {note}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ft_engine::model::modules::parameters;

    /// Parameter counts from the model cards, for Qwen3.5 of the text model.
    #[test]
    fn built_in_configs_have_the_published_sizes() -> anyhow::Result<()> {
        for (id, billions) in [
            ("Qwen/Qwen3-0.6B", 0.596),
            ("Qwen/Qwen3-1.7B", 1.72),
            ("Qwen/Qwen3-4B", 4.02),
            ("Qwen/Qwen3-8B", 8.19),
            ("Qwen/Qwen3-14B", 14.77),
            ("Qwen/Qwen3-32B", 32.76),
            ("Qwen/Qwen3-30B-A3B", 30.53),
            ("Qwen/Qwen3-235B-A22B", 235.09),
            ("Qwen/Qwen3.5-9B", 8.95),
            ("Qwen/Qwen3.5-27B", 26.90),
            ("Qwen/Qwen3.5-35B-A3B", 34.66),
            ("Qwen/Qwen2.5-7B-Instruct", 7.62),
            ("Qwen/Qwen2-72B", 72.71),
            ("meta-llama/Llama-3.1-8B", 8.03),
            ("meta-llama/Llama-3.1-405B", 405.85),
            ("meta-llama/Meta-Llama-3-70B", 70.55),
            ("meta-llama/Llama-3.3-70B-Instruct", 70.55),
            ("mistralai/Mixtral-8x7B-v0.1", 46.70),
        ] {
            let Some((file, text)) = builtin(id) else { anyhow::bail!("{id} is not built in") };
            let config = Config::parse(file, serde_json::from_str(text)?)?;
            let n = parameters(&config) as f64 / 1e9;
            assert!((n - billions).abs() < 0.006, "{id}: {n}");
        }
        Ok(())
    }
}
