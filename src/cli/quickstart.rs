//! The quickstart's model and rows, inside the binary.

use ft_base::store;
use ft_base::terminal::{tell, warn};
use ft_recipe::{Recipe, Shipped};
use std::path::Path;

macro_rules! files {
    ($($path:literal),* $(,)?) => {
        &[$(($path, include_bytes!(concat!("../../", $path)))),*]
    };
}

/// Paths, as the shipped recipes name them, and contents.
const FILES: &[(&str, &[u8])] = files![
    "data/model/config.json",
    "data/model/generation_config.json",
    "data/model/model.safetensors",
    "data/model/tokenizer.json",
    "data/model/tokenizer_config.json",
    "data/quickstart/choices-eval.jsonl",
    "data/quickstart/choices-train.jsonl",
    "data/quickstart/eval.jsonl",
    "data/quickstart/labels-eval.jsonl",
    "data/quickstart/labels-train.jsonl",
    "data/quickstart/pairs-eval.jsonl",
    "data/quickstart/pairs-train.jsonl",
    "data/quickstart/rated-eval.jsonl",
    "data/quickstart/rated-train.jsonl",
    "data/quickstart/train.jsonl",
];

/// Writes the model and the rows of a shipped recipe to the current folder. Existing files are kept. Warns of rows that
/// other commands make, and of the quickstart's rows for another model. A plan needs no `rows`.
///
/// # Errors
/// The folder cannot be written.
pub(super) fn provide(named: &Path, recipe: &Recipe, rows: bool) -> ft_base::Result<()> {
    let name = named.to_str().filter(|_| !named.exists());
    let Some(shipped) = name.and_then(|n| Shipped::find(n).ok()) else { return Ok(()) };
    let sources = recipe.data.all_sources().map(|s| s.source.as_str()).filter(|_| rows);
    let wanted: Vec<&str> = std::iter::once(recipe.model.source.as_str()).chain(sources).collect();
    let is_wanted = |path: &str| wanted.iter().any(|w| Path::new(path).starts_with(w));
    let absent = FILES.iter().filter(|(path, _)| is_wanted(path) && !Path::new(path).exists());
    let mut written = Vec::new();
    for (path, bytes) in absent {
        store::write_atomic(Path::new(path), bytes)?;
        written.extend(Path::new(path).parent().map(|p| p.display().to_string()));
    }
    written.dedup();
    if !written.is_empty() {
        tell(&format!("written here from the binary: {}", written.join(", ")));
    }
    let ships = |source: &str| FILES.iter().any(|(path, _)| Path::new(path).starts_with(source));
    if !ships(&recipe.model.source) && wanted[1..].iter().any(|source| ships(source)) {
        warn("data.train has sample rows, those of the quickstart\n  hint: data.train.0.source=your.jsonl");
    }
    let made = |path: &&&str| path.starts_with("runs/") && shipped.text.contains(**path);
    if let Some(absent) = wanted.iter().filter(made).find(|path| !Path::new(path).exists()) {
        warn(&format!("{absent} is not there; the recipe says what makes it:\n{}", shipped.needs()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the quickstart names is inside.
    #[test]
    fn shipped_recipes_find_their_files() {
        for shipped in ft_recipe::SHIPPED {
            let recipe = Recipe::parse(shipped.text, "r.toml", &[]).expect("a recipe");
            let sources = recipe.data.all_sources().map(|s| s.source.as_str());
            for path in sources.chain([recipe.model.source.as_str()]).filter(|p| p.starts_with("data/")) {
                assert!(
                    FILES.iter().any(|(f, _)| Path::new(f).starts_with(path)),
                    "{}: {path}",
                    shipped.name
                );
            }
        }
    }
}
