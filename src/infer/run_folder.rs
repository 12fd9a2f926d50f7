//! The recipe of a run folder.

use crate::log::read_metrics;
use crate::train::job::hash::model_hash;
use crate::train::job::of_task;
use crate::train::layout::is_run;
use crate::train::{Error, Job};
use ft_base::store::folder_of;
use ft_base::terminal::shell_word;
use ft_engine::model::Config;
use ft_hub::Want;
use ft_recipe::{Init, Recipe, Reference};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// As `run_recipe`, given the run folder or a folder up to two levels below; `None` in no run.
///
/// # Errors
/// Unreadable recipe.
pub fn recipe_of(folder: &Path, set: &[String]) -> ft_base::Result<Option<Recipe>> {
    let run = folder.ancestors().take(3).find(|d| d.join("recipe.toml").is_file());
    run.filter(|_| folder.is_dir()).map(|run| run_recipe(run, set)).transpose()
}

/// Loads the resolved recipe of a run folder, with the `KEY=VALUE` overrides `set`. Relative paths go by the folders
/// recorded in the metrics, paths in `set` by the working directory.
///
/// # Errors
/// Unreadable recipe.
pub fn run_recipe(run: &Path, set: &[String]) -> ft_base::Result<Recipe> {
    let mut recipe = Recipe::load(&run.join("recipe.toml"), set)?;
    let Some(begun) = begun(run) else { return Ok(recipe) };
    let (folders, given) = (folders(&begun), recipe.clone());
    let found = |key: &str, written: &str| {
        let of_run = given.place(key).file == given.place("").file;
        of_run.then(|| from_here(&folders, written)).flatten()
    };
    if let Some(path) = begun["model"]["source"].as_str().and_then(|s| found("model.source", s)) {
        recipe.model.source = path;
    }
    for (list, name) in [(&mut recipe.data.train, "train"), (&mut recipe.data.eval, "eval")] {
        for (i, source) in list.iter_mut().enumerate() {
            if let Some(path) = found(&format!("data.{name}.{i}.source"), &source.source) {
                source.source = path;
            }
        }
    }
    let template = recipe.data.chat_template.as_ref();
    if let Some(path) = template.and_then(|t| found("data.chat_template", &t.to_string_lossy())) {
        recipe.data.chat_template = Some(path.into());
    }
    if let Some(path) = recipe.lora.init.adapter().and_then(|a| found("lora.init", a)) {
        recipe.lora.init = Init::Adapter(path);
    }
    if let Reference::Other(other) = &mut recipe.preference.reference
        && let Some(path) = found("preference.reference", other)
    {
        *other = path;
    }
    Ok(recipe)
}

/// The folder of a run's base, named `written` in the config of its adapter. `None` for another base, one of the hub,
/// or one that has moved.
pub fn run_base(run: &Path, written: &str) -> Option<String> {
    let begun = begun(run).filter(|begun| begun["model"]["source"] == written)?;
    from_here(&folders(&begun), written)
}

/// Checks that the base model of a resumed run is found, if the run folder has moved.
///
/// # Errors
/// The base exists only relative to the original folder.
pub fn check_moved(file: &Path, recipe: &Recipe) -> ft_base::Result<()> {
    let (run, source) = (folder_of(file), &recipe.model.source);
    if !is_run(run) || recipe.resolve(source).exists() {
        return Ok(());
    }
    let Some(base) = run_base(run, source) else { return Ok(()) };
    let output = run.canonicalize().unwrap_or_else(|_| run.into());
    let set = [format!("model.source={base}"), format!("run.output={}", output.display())];
    let [base_here, output_here] = set.each_ref().map(|set| shell_word(set));
    let why = format!(
        "model.source: {source:?} is not there; the run began with {base}\n  hint: {base_here} {output_here}, and \
         the recipe's other relative paths likewise"
    );
    Err(Error::at(recipe, "model.source", why).into())
}

/// Whether the model in `base` has another config or other weights than at the start of a run; `None` if the hash of
/// either is unknown.
pub fn is_other_base(run: &Path, base: &Path) -> Option<bool> {
    let begun = begun(run)?;
    let trained = begun["hashes"]["model"].as_str()?;
    let recipe = Recipe::load(&run.join("recipe.toml"), &[]).ok()?;
    let config = of_task(&recipe, Config::load(base, &recipe.model.overrides).ok()?).ok()?;
    Some(model_hash(&recipe, &config, base).ok()? != trained)
}

/// The newest start or resumption of a run. It wrote the recipe.
fn begun(run: &Path) -> Option<Value> {
    let events = read_metrics(&run.join("metrics.jsonl")).unwrap_or_default();
    events.into_iter().rfind(|e| e["model"]["source"].is_string())
}

/// Base folders of the relative paths of a run: the working directory (empty if unknown or the current one), and the
/// folder of the recipe.
fn folders(begun: &Value) -> Vec<PathBuf> {
    let here = std::env::current_dir().ok();
    let of = |key: &str| begun["folders"][key].as_str().map(PathBuf::from);
    let working = of("working").filter(|w| here.as_ref() != Some(w)).unwrap_or_default();
    std::iter::once(working).chain(of("recipe")).collect()
}

/// A path in the first folder with it; `None` if none has. Of a pattern, the folders before the first wildcard decide.
fn from_here(folders: &[PathBuf], written: &str) -> Option<String> {
    let literal = match written.find(['*', '?', '[']) {
        Some(at) => written[..at].rfind('/').map_or(".", |slash| &written[..=slash]),
        None => written,
    };
    let folder = folders.iter().find(|f| f.join(literal).exists())?;
    Some(folder.join(written).display().to_string())
}

/// Opens the recipe of a run for inference. Data sources are only needed for their prompt format, and not read.
///
/// # Errors
/// As [`Job::open`].
pub fn open_without_data(mut recipe: Recipe, want: Want, progress: bool) -> ft_base::Result<Job> {
    let (train, _) = (std::mem::take(&mut recipe.data.train), std::mem::take(&mut recipe.data.eval));
    let mut job = Job::open(recipe, want, progress)?;
    job.recipe.data.train = train;
    Ok(job)
}
