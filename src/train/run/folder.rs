//! Leftovers of an earlier run in a run folder.

use super::options::Options;
use crate::train::Error;
use crate::train::checkpoint::state::State;
use crate::train::job::Job;
use crate::train::layout::{CHECKPOINTS, RESULTS, result_dir};
use ft_base::store::{self, checkpoint};
use ft_recipe::Recipe;
use serde_json::json;
use std::path::{Path, PathBuf, absolute};

/// The run folder, or its nearest existing parent.
///
/// # Errors
/// A file in place of a folder.
pub fn folder_there(recipe: &Recipe) -> Result<PathBuf, Error> {
    let dir = absolute(&recipe.run.output).unwrap_or_default();
    let there = dir.ancestors().find(|p| p.exists()).unwrap_or(Path::new("."));
    if there.is_dir() {
        return Ok(there.into());
    }
    let why = format!("{} is a file, and run.output is a folder", there.display());
    Err(Error::at(recipe, "run.output", format!("{why}\n  hint: another run.output")))
}

/// Checks that the run folder can be made and written to; nothing is left there.
///
/// # Errors
/// A file in place of a folder, or a folder where no file can be made.
pub fn check_writable(recipe: &Recipe) -> Result<(), Error> {
    let there = folder_there(recipe)?;
    // by a file without a name: access() allows the superuser all, in /proc too
    tempfile::tempfile_in(&there).map(drop).map_err(|_| {
        let why = format!("{} is not writable\n  hint: another run.output", there.display());
        Error::at(recipe, "run.output", why)
    })
}

/// Refuses to write into the folder of an earlier run without `--overwrite` or `--resume`.
pub fn refuse_earlier(recipe: &Recipe, options: &Options) -> ft_base::Result<()> {
    let dir = &recipe.run.output;
    if options.overwrite {
        return Ok(());
    }
    let shown = dir.display().to_string();
    if checkpoint::any(&dir.join(CHECKPOINTS)) {
        let hint = "--resume goes on from them, ";
        let error = Error::Exists { dir: shown, what: "checkpoints of an earlier run".into(), hint };
        return if options.resume { Ok(()) } else { Err(error.into()) };
    }
    let results = RESULTS.into_iter().map(|name| dir.join(name));
    if let Some(result) = results.into_iter().find(|r| filled(r) && !reads(recipe, r)) {
        return Err(exists(dir, &result));
    }
    if ended(dir) {
        let what = "the metrics of a run that ended, and no checkpoints to go on from".into();
        return Err(Error::Exists { dir: shown, what, hint: "" }.into());
    }
    Ok(())
}

/// Error for a run folder with the result of an earlier run.
pub fn exists(dir: &Path, result: &Path) -> ft_base::Error {
    let name = result.file_name().unwrap_or_default().to_string_lossy();
    let what = format!("{name}/ of an earlier run, and no checkpoints to go on from");
    Error::Exists { dir: dir.display().to_string(), what, hint: "" }.into()
}

/// Returns true if a path exists and is not an empty folder.
pub fn filled(path: &Path) -> bool {
    match path.read_dir() {
        Ok(mut entries) => entries.next().is_some(),
        Err(_) => path.symlink_metadata().is_ok(),
    }
}

/// Returns true if a folder contains the model or adapter of a recipe.
fn reads(recipe: &Recipe, dir: &Path) -> bool {
    let Ok(dir) = dir.canonicalize() else { return false };
    let sources = [Some(recipe.model.source.as_str()), recipe.lora.init.adapter()];
    let inside = |s: &str| recipe.resolve(s).canonicalize().is_ok_and(|p| p.starts_with(&dir));
    sources.into_iter().flatten().any(inside)
}

/// Returns true if the metrics of a run folder contain an `end` event.
pub fn ended(dir: &Path) -> bool {
    crate::log::read_metrics(&dir.join("metrics.jsonl"))
        .is_ok_and(|m| m.iter().any(|e| e["event"] == json!("end")))
}

/// Removes results and checkpoints of an earlier run. Keeps other files, inputs of this run, and the old
/// result until the new one replaces it.
pub fn clear(job: &Job, dir: &Path) -> Result<(), store::Error> {
    let result = result_dir(&job.selection, dir);
    for name in RESULTS.into_iter().chain([CHECKPOINTS]) {
        let p = dir.join(name);
        if p != result && p.symlink_metadata().is_ok() && !reads(&job.recipe, &p) {
            std::fs::remove_dir_all(&p).map_err(|e| store::Error::write("remove", &p, e))?;
        }
    }
    Ok(())
}

/// With `micro_rows = "auto"`, reuses the earlier value, from the checkpoint or else from the resolved
/// recipe in the run folder. Another value would change the order of sums, and so the bits of the result.
pub fn keep_micro_rows(recipe: &mut Recipe, reached: Option<&State>, dir: &Path) {
    if !recipe.run.micro_rows.is_auto() {
        return;
    }
    const KEY: &str = "run.micro_rows";
    let written = match reached {
        Some(state) => state.identity.get(KEY).cloned(),
        None => Recipe::load(&dir.join("recipe.toml"), &[]).ok().and_then(|r| {
            let (mut then, mut now) = (r.math_keys(), recipe.math_keys());
            let rows = then.remove(KEY);
            now.remove(KEY);
            rows.filter(|_| then == now)
        }),
    };
    let rows = written.and_then(|n| n.parse::<usize>().ok());
    let fits =
        |n: &usize| *n > 0 && recipe.run.batch_rows.is_multiple_of(n.saturating_mul(recipe.parallel.data));
    if let Some(n) = rows.filter(fits) {
        recipe.run.micro_rows = n.into();
    }
}
