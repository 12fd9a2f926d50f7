//! `ft report`: a run folder as one self-contained HTML file.
//!
//! ```text
//! card     model card of a run's result
//! read     metrics.jsonl -> deduplicated steps;   files: other files of the run folder
//! series   numbers by step: smoothing, thinning, formatting
//! chart    curves -> SVG coordinates;   heat: expert load;   memory: plan and measurement
//! view     all contents of the page;   several: the page of several runs
//! base.html, page.html, several.html, page.css   layout, rendered by minijinja with HTML escaping
//! ```
//!
//! The page loads nothing from outside and runs no script; samples and names are escaped text. The same
//! folder always gives the same page.

mod card;
mod chart;
mod files;
mod heat;
mod memory;
mod read;
mod series;
mod several;
#[cfg(test)]
mod tests;
mod view;

pub use card::{CARD, card, is_hub_id, is_untouched, leave_card};

use ft_base::error::{ExitCode, Failure};
use ft_base::store;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, UndefinedBehavior, context};
use std::path::{Path, PathBuf};

/// Why no report was written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder has no metrics.
    #[error(
        "cannot read {}: {source}\nhint: `ft report` takes the folder of a run: what `ft run` calls run.output, runs/NAME by default",
        path.display()
    )]
    NoMetrics {
        /// Path of the missing metrics file.
        path: PathBuf,
        source: std::io::Error,
    },
    /// The metrics file has no event.
    #[error("{}: no event of a run is in it; the file is empty, or another program's", path.display())]
    Nothing {
        /// The metrics file.
        path: PathBuf,
    },
    /// More runs than distinguishable line styles.
    #[error("{runs} runs: one page shows {} at the most", several::MOST)]
    Many {
        /// Number of runs given.
        runs: usize,
    },
    /// A file that could not be read or written.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// A template error: a bug in ft.
    #[error("the page of the report: {0}\n  this is a bug in ft: please report it")]
    Page(#[from] minijinja::Error),
}

impl Error {
    fn no_metrics(path: &Path, source: std::io::Error) -> Self {
        Self::NoMetrics { path: path.to_path_buf(), source }
    }
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::NoMetrics { .. } | Error::Nothing { .. } => ExitCode::Storage,
            Error::Store(e) => e.exit_code(),
            Error::Many { .. } => ExitCode::Usage,
            Error::Page(_) => ExitCode::Internal,
        }
    }
}

/// Writes the report of the run in folder `run` to `out`, by default `report.html` in the run folder, and
/// returns the file's path.
///
/// # Errors
/// A folder without `metrics.jsonl`, a metrics file without events, a file that cannot be written.
pub fn write(run: &Path, out: Option<&Path>) -> Result<PathBuf, Error> {
    let page = page(run)?;
    let out = out.map_or_else(|| run.join("report.html"), Path::to_path_buf);
    store::write_atomic(&out, page.as_bytes())?;
    Ok(out)
}

/// Writes one page for several runs to `out` and returns the file's path.
///
/// # Errors
/// As [`write()`]; more runs than a page shows.
pub fn write_several(runs: &[PathBuf], out: &Path) -> Result<PathBuf, Error> {
    if runs.len() > several::MOST {
        return Err(Error::Many { runs: runs.len() });
    }
    let read = |run: &PathBuf| {
        let metrics = read::Metrics::read(&run.join("metrics.jsonl"))?;
        let own = read::text(&metrics.start, "name").to_string();
        Ok((own, several::Run { name: String::new(), metrics, files: files::Files::look(run) }))
    };
    let mut all = runs.iter().map(read).collect::<Result<Vec<_>, Error>>()?;
    let named: Vec<String> = all.iter().map(|(own, _)| own.clone()).collect();
    for ((own, run), folder) in all.iter_mut().zip(runs) {
        let alone = !own.is_empty() && named.iter().filter(|n| *n == own).count() == 1;
        run.name = if alone { own.clone() } else { folder.display().to_string() };
    }
    let all: Vec<several::Run> = all.into_iter().map(|(_, run)| run).collect();
    store::write_atomic(out, render("several.html", &several::Several::new(&all))?.as_bytes())?;
    Ok(out.to_path_buf())
}

/// The report of the run in folder `run`, as HTML.
///
/// # Errors
/// As [`write()`].
pub fn page(run: &Path) -> Result<String, Error> {
    let path = run.join("metrics.jsonl");
    let metrics = read::Metrics::read(&path)?;
    let mut heats = Vec::new();
    let ends = [metrics.spread.first_key_value(), metrics.spread.last_key_value()];
    for (step, spread) in ends.into_iter().flatten() {
        let title = view::steps_of(*step, spread);
        if heats.iter().all(|h: &heat::Heat| h.title != title) {
            heats.extend(heat::Heat::new(title, &read::layers(&path, spread)?));
        }
    }
    let whole = std::path::absolute(run).unwrap_or_else(|_| run.to_path_buf());
    let name = whole.file_name().map_or_else(|| "run".into(), |n| n.to_string_lossy().into_owned());
    let view = view::View::new(&name, &metrics, heats, files::Files::look(run));
    render("page.html", &view)
}

fn render(page: &str, view: &impl serde::Serialize) -> Result<String, Error> {
    let mut env = Environment::new();
    env.set_auto_escape_callback(|_| AutoEscape::Html);
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.add_template("page.css", include_str!("page.css"))?;
    env.add_template("parts.html", include_str!("parts.html"))?;
    env.add_template("base.html", include_str!("base.html"))?;
    env.add_template("page.html", include_str!("page.html"))?;
    env.add_template("several.html", include_str!("several.html"))?;
    Ok(env.get_template(page)?.render(context! { ..minijinja::Value::from(Serde(view)) })?)
}
