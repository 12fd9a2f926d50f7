//! The recipe of a run folder.

use crate::log::read_metrics;
use ft_recipe::Recipe;
use std::path::{Path, PathBuf};

/// The recipe.toml of a run, given the run folder or a folder up to two levels below.
pub fn recipe_of(folder: &Path) -> Option<PathBuf> {
    folder
        .is_dir()
        .then(|| folder.ancestors().take(3).map(|d| d.join("recipe.toml")).find(|r| r.is_file()))?
}

/// Loads the resolved recipe of a run folder. The model source is replaced by the path recorded in the
/// metrics.
///
/// # Errors
/// Unreadable recipe.
pub fn run_recipe(run: &Path) -> ft_base::Result<Recipe> {
    let mut recipe = Recipe::load(&run.join("recipe.toml"), &[])?;
    // Relative to the working directory of the run.
    let events = read_metrics(&run.join("metrics.jsonl")).unwrap_or_default();
    let found = events.iter().find_map(|e| e["model"]["source"].as_str());
    if let Some(source) = found.filter(|s| Path::new(s).exists()) {
        recipe.model.source = source.into();
    }
    Ok(recipe)
}
