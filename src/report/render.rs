//! Writes pages: contents of a run folder, rendered by templates.

use super::comparison::{MAX_RUNS, Run, comparison_view};
use super::error::Error;
use super::files::Files;
use super::metrics::{Metrics, expert_counts, text};
use super::page::page_view;
use super::plot::HeatMap;
use ft_base::store;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, UndefinedBehavior, Value, context};
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

/// Writes the page of `runs` to `out` and returns the file's path; by default `report.html` in the folder of a run, and
/// `comparison.html` here for several.
///
/// # Errors
/// As [`page`]; a file that cannot be written.
pub fn write(runs: &[PathBuf], out: Option<&Path>) -> Result<PathBuf, Error> {
    let page = page(runs, false)?;
    let out = match (out, runs) {
        (Some(out), _) => out.to_path_buf(),
        (None, [run]) => run.join("report.html"),
        (None, _) => "comparison.html".into(),
    };
    store::write_atomic(&out, page.as_bytes())?;
    Ok(out)
}

/// The page of a run, or of several side by side, as HTML; `live` pages renew themselves.
///
/// # Errors
/// A folder without `metrics.jsonl`, a metrics file without events, more runs than a page shows.
pub fn page(runs: &[PathBuf], live: bool) -> Result<String, Error> {
    match runs {
        [run] => single(run, live),
        runs => comparison(runs, live),
    }
}

fn comparison(runs: &[PathBuf], live: bool) -> Result<String, Error> {
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
    render("comparison.html", comparison_view(&all), live)
}

fn single(run: &Path, live: bool) -> Result<String, Error> {
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
    render("page.html", page_view(&name, &metrics, maps, Files::list(run)), live)
}

/// Fills a template. By minijinja's default, values in one named `.html` are escaped.
pub(super) fn render(page: &str, view: Value, live: bool) -> Result<String, Error> {
    let mut env = Environment::new();
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    for (name, text) in TEMPLATES {
        env.add_template(name, text)?;
    }
    Ok(env.get_template(page)?.render(context! { live, ..view })?)
}
