//! The base model of an adapter: where to find it, and whether to quantize it.

use super::run_folder::{is_other_base, run_base};
use super::usage;
use ft_base::terminal::{plural, tell, warn};
use ft_engine::adapters::{self, Adapter};
use ft_engine::model::Config;
use ft_hub::{ModelDir, Want};
use ft_recipe::Quantize;
use std::path::Path;

/// Finds a model, downloads missing files, and prints the notes on it.
///
/// # Errors
/// As [`ft_hub::fetch_model`].
pub fn fetch_model(source: &str, revision: &str, want: Want) -> Result<ModelDir, ft_hub::Error> {
    let model = ft_hub::fetch_model(source, revision, want, true)?;
    model.notes.iter().for_each(|n| warn(n));
    Ok(model)
}

/// Finds and opens an adapter.
///
/// # Errors
/// A missing or unusable adapter.
pub fn open_adapter(source: &str) -> ft_base::Result<Adapter> {
    Adapter::open(&ft_hub::fetch_adapter(source, "main", true)?)
}

/// Option of verbs that take another base than the one named in the adapter's config.
pub const BASE_OPTION: &str = "--base MODEL";

/// The base named on the command line, or the one named in the adapter's config; of the adapter of a `run`, in the
/// folder that the run took it from. `way` is how the verb names another base, for hints.
///
/// # Errors
/// A missing base.
pub fn base_of(
    adapter: &Adapter,
    run: Option<&Path>,
    named: Option<&str>,
    way: &str,
    want: Want,
) -> ft_base::Result<ModelDir> {
    let fail = |why| adapters::Error::Peft { file: adapter.config.file.clone(), why };
    let (source, revision) = match (named, adapter.config.base()) {
        (Some(base), _) => (base.to_string(), None),
        (None, Some((base, revision))) => {
            let of_run = run.and_then(|run| run_base(run, base));
            (of_run.unwrap_or_else(|| base.to_string()), revision)
        }
        (None, None) => {
            return Err(fail(format!("base_model_name_or_path: names no base\n  hint: {way}")).into());
        }
    };
    let model = fetch_model(&source, revision.unwrap_or("main"), want);
    model.map_err(|e| match (named, e) {
        (None, e @ ft_hub::Error::Missing { .. }) => fail(format!(
            "base_model_name_or_path: {e}\n  hint: {way}, or run it where that path leads to it"
        ))
        .into(),
        (_, e) => ft_base::Error::from(e),
    })
}

/// Warns if the base of a run's adapter has changed since the run began.
pub fn warn_of_change(run: Option<&Path>, base: &ModelDir) {
    let changed = |run: &&Path| is_other_base(run, &base.dir) == Some(true);
    if let Some(run) = run.filter(changed) {
        warn(&format!(
            "{}: the base has changed since the training: {} was trained on other weights\n  \
             hint: put them back, or name the base of the training as {BASE_OPTION}",
            base.source,
            run.display()
        ));
    }
}

/// Whether to quantize the base to NF4 while loading: as `chosen`, or as in the adapter's training. Prints
/// a message in the latter case.
///
/// # Errors
/// An adapter with unknown quantization metadata.
pub fn quantized(
    chosen: Option<Quantize>,
    adapter: Option<&Adapter>,
    config: &Config,
) -> ft_base::Result<bool> {
    let trained = adapter.map_or(Ok(Quantize::None), Adapter::quantize)?;
    // a 4-bit checkpoint is never quantized again
    if config.is_bitsandbytes() {
        return Ok(false);
    }
    if chosen.is_none() && trained == Quantize::Nf4 {
        tell("the base is loaded in NF4, as it was when the adapter was trained (--quantize none: as it is)");
    }
    Ok(chosen.unwrap_or(trained) == Quantize::Nf4)
}

/// Refuses reward models and classifiers for generation of text.
///
/// # Errors
/// A score head.
pub fn refuse_scores(config: &Config) -> ft_base::Result<()> {
    let Some(labels) = &config.scores else { return Ok(()) };
    Err(usage(format!(
        "the model has a score head of {} in place of the vocabulary's, and makes no text\n  hint: ft eval; \
         or, after ft merge of an adapter, transformers' AutoModelForSequenceClassification",
        plural(labels.len(), "output")
    )))
}
