//! Resolves data sources: downloads datasets of the hub, and detects missing formats from the first row.

use ft_base::store;
use ft_base::terminal::{tell, warn};
use ft_data::{PromptFormat, Shape};
use ft_hub::{DatasetName, Settings};
use ft_recipe::{Data, Form, Recipe, Source};

/// Resolves all data sources of a recipe in place. Returns one error per unresolved source.
pub fn resolve(settings: &Settings, recipe: &mut Recipe, progress: bool) -> Vec<ft_base::Error> {
    let mut data = recipe.data.clone();
    let mut problems = Vec::new();
    for (list, sources) in [("train", &mut data.train), ("eval", &mut data.eval)] {
        for (i, source) in sources.iter_mut().enumerate() {
            match resolve_source(settings, recipe, source, progress) {
                Err(e) => problems.push(e),
                Ok(Some(shape)) if progress => {
                    tell(&format!("data.{list}.{i}: {}: {}, by its first row", source.source, shape.keys()));
                }
                Ok(_) => {}
            }
        }
    }
    recipe.data = data;
    problems
}

/// Fills in missing forms: chat if the model has a chat template. Pairs and rated completions keep theirs open, since
/// rows of messages have no other. With `told`, says so, and warns about a mixture of forms.
pub fn settle_forms(data: &mut Data, template: bool, told: bool) {
    let form = if template { Form::Chat } else { Form::Plain };
    for (list, sources) in [("train", &mut data.train), ("eval", &mut data.eval)] {
        for (i, s) in sources.iter_mut().enumerate() {
            let Some(format) = s.format.filter(|f| s.form.is_none() && f.has_forms()) else { continue };
            if format.is_preference() {
                if told && template {
                    tell(&format!(
                        "data.{list}.{i}: {}: form = \"plain\" where rows hold texts; form = \"chat\" takes them \
                         through the chat template",
                        s.source
                    ));
                }
                continue;
            }
            s.form = Some(form);
            if told {
                let why =
                    if template { "the model has a chat template" } else { "the model has no chat template" };
                tell(&format!("data.{list}.{i}: {}: form = {:?}, as {why}", s.source, form.word()));
            }
        }
    }
    let forms = PromptFormat::all_of(&data.train, template);
    if told && forms.len() > 1 {
        let each: Vec<&str> = forms.iter().map(|f| f.trains()).collect();
        warn(&format!(
            "data.train mixes {}: ft chat and ft serve ask in the first of these forms",
            each.join(" with ")
        ));
    }
}

/// Resolves one source. Returns the detected shape, if the recipe has no format.
fn resolve_source(
    settings: &Settings,
    recipe: &Recipe,
    source: &mut Source,
    progress: bool,
) -> ft_base::Result<Option<Shape>> {
    let resolve = |s: &str| recipe.resolve(s);
    if let Some(id) = ft_data::is_hub_id(&source.source)
        && !resolve(&source.source).exists()
    {
        let revision = source.revision.as_deref().unwrap_or("main");
        let (config, split) = (source.config.as_deref(), source.slice().0);
        let name = DatasetName { id, revision, config, split };
        let kept = store::cache_folder();
        let found =
            ft_hub::fetch_dataset_with(settings, kept.as_deref(), name, progress).map_err(|e| match e {
                ft_hub::Error::NotFound { .. } => ft_base::Error::from(ft_data::Error::NoDataset {
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
        return Ok(None);
    }
    if let Some(format) = recipe.task.format() {
        source.format = Some(format);
        return Ok(None);
    }
    let mut shape = ft_data::detect(source, &resolve)?;
    source.format = Some(shape.format);
    if source.fields.is_empty() {
        source.fields.clone_from(&shape.fields);
    } else {
        shape.fields.clear();
    }
    Ok(Some(shape))
}
