//! Resolves data sources: downloads datasets of the hub, and detects missing formats from the first row.

use ft_base::store;
use ft_base::terminal::{tell, warn};
use ft_data::hub::{self, DatasetName, Settings};
use ft_recipe::{Recipe, Source};

/// Resolves all data sources of a recipe in place. Returns one error per unresolved source.
pub fn resolve(settings: &Settings, recipe: &mut Recipe, progress: bool) -> Vec<ft_base::Error> {
    let mut data = recipe.data.clone();
    let mut problems = Vec::new();
    for (list, sources) in [("train", &mut data.train), ("eval", &mut data.eval)] {
        for (i, source) in sources.iter_mut().enumerate() {
            match resolve_source(settings, recipe, source, progress) {
                Err(e) => problems.push(e),
                Ok(true) if progress => {
                    let format = source.format.map_or("", |f| f.word());
                    tell(&format!(
                        "data.{list}.{i}: {}: format = {format:?}, by its first row",
                        source.source
                    ));
                }
                Ok(_) => {}
            }
        }
    }
    recipe.data = data;
    problems
}

/// Resolves one source. Returns true if the format was detected.
fn resolve_source(
    settings: &Settings,
    recipe: &Recipe,
    source: &mut Source,
    progress: bool,
) -> ft_base::Result<bool> {
    let resolve = |s: &str| recipe.resolve(s);
    if let Some(id) = ft_data::is_hub_id(&source.source)
        && !resolve(&source.source).exists()
    {
        let revision = source.revision.as_deref().unwrap_or("main");
        let (config, split) = (source.config.as_deref(), source.split.as_deref());
        let name = DatasetName { id, revision, config, split };
        let kept = store::cache_folder();
        let found =
            hub::fetch_dataset_with(settings, kept.as_deref(), name, progress).map_err(|e| match e {
                hub::Error::NotFound { .. } => ft_base::Error::from(ft_data::Error::NoDataset {
                    source_name: source.source.clone(),
                    path: resolve(&source.source),
                    cause: e.to_string(),
                }),
                e => e.into(),
            })?;
        found.notes.iter().for_each(|n| warn(n));
        source.fetched = found.files;
    }
    if source.format.is_some() {
        return Ok(false);
    }
    source.format = Some(ft_data::detect_format(source, &resolve)?);
    Ok(true)
}
