//! Writes pages: contents of a run folder, rendered by templates.

use super::comparison::{Comparison, MAX_RUNS, Run};
use super::error::Error;
use super::files::Files;
use super::metrics::{Metrics, expert_counts, text};
use super::page::Page;
use super::plot::HeatMap;
use ft_base::store;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, UndefinedBehavior, context};
use std::path::{Path, PathBuf};

/// Layout of the pages and of model cards.
const TEMPLATES: [(&str, &str); 6] = [
    ("card.md", include_str!("templates/card.md")),
    ("page.css", include_str!("templates/page.css")),
    ("parts.html", include_str!("templates/parts.html")),
    ("base.html", include_str!("templates/base.html")),
    ("page.html", include_str!("templates/page.html")),
    ("comparison.html", include_str!("templates/comparison.html")),
];

/// Writes the report of the run in folder `run` to `out`, by default `report.html` in the run folder, and
/// returns the file's path.
///
/// # Errors
/// A folder without `metrics.jsonl`, a metrics file without events, a file that cannot be written.
pub fn write(run: &Path, out: Option<&Path>) -> Result<PathBuf, Error> {
    let page = page(run, false)?;
    let out = out.map_or_else(|| run.join("report.html"), Path::to_path_buf);
    store::write_atomic(&out, page.as_bytes())?;
    Ok(out)
}

/// Writes one page for several runs to `out` and returns the file's path.
///
/// # Errors
/// As [`write()`]; more runs than a page shows.
pub fn write_comparison(runs: &[PathBuf], out: &Path) -> Result<PathBuf, Error> {
    store::write_atomic(out, comparison(runs, false)?.as_bytes())?;
    Ok(out.to_path_buf())
}

/// The page of several runs, as HTML.
///
/// # Errors
/// As [`write_comparison()`].
pub fn comparison(runs: &[PathBuf], live: bool) -> Result<String, Error> {
    if runs.len() > MAX_RUNS {
        return Err(Error::Many { runs: runs.len(), most: MAX_RUNS });
    }
    let metrics = runs.iter().map(|run| Metrics::read(&run.join("metrics.jsonl")));
    let metrics = metrics.collect::<Result<Vec<_>, Error>>()?;
    let names: Vec<String> = metrics.iter().map(|m| text(&m.start, "name").to_string()).collect();
    let is_unique = |name: &String| !name.is_empty() && names.iter().filter(|n| *n == name).count() == 1;
    let run = |((metrics, name), folder): ((Metrics, &String), &PathBuf)| Run {
        name: if is_unique(name) { name.clone() } else { folder.display().to_string() },
        files: Files::list(folder),
        metrics,
    };
    let all: Vec<Run> = metrics.into_iter().zip(&names).zip(runs).map(run).collect();
    render("comparison.html", &Comparison::new(&all), live)
}

/// The report of the run in folder `run`, as HTML; `live` pages renew themselves.
///
/// # Errors
/// As [`write()`].
pub fn page(run: &Path, live: bool) -> Result<String, Error> {
    let path = run.join("metrics.jsonl");
    let metrics = Metrics::read(&path)?;
    let mut maps = Vec::new();
    let ends = [metrics.expert_load.first_key_value(), metrics.expert_load.last_key_value()];
    for (step, load) in ends.into_iter().flatten() {
        let title = load.steps_until(*step);
        if maps.iter().all(|map: &HeatMap| map.title != title) {
            maps.extend(HeatMap::new(title, &expert_counts(&path, load)?));
        }
    }
    let whole = std::path::absolute(run).unwrap_or_else(|_| run.to_path_buf());
    let name = whole.file_name().map_or_else(|| "run".into(), |n| n.to_string_lossy().into_owned());
    render("page.html", &Page::new(&name, &metrics, maps, Files::list(run)), live)
}

/// Fills a template; HTML is escaped.
pub(super) fn render(page: &str, view: &impl serde::Serialize, live: bool) -> Result<String, Error> {
    let mut env = Environment::new();
    env.set_auto_escape_callback(
        |name| {
            if name.ends_with(".html") { AutoEscape::Html } else { AutoEscape::None }
        },
    );
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    for (name, text) in TEMPLATES {
        env.add_template(name, text)?;
    }
    Ok(env.get_template(page)?.render(context! { live, ..minijinja::Value::from(Serde(view)) })?)
}
