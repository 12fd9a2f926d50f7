//! `ft report`: a run folder as one HTML file that stands alone.
//!
//! ```text
//! card     a run as the model card of its result
//! read     metrics.jsonl -> each step once;   files: what else lies in the folder
//! series   numbers by step: smoothed, thinned out, in words
//! chart    curves -> places on paper;   heat: load of the experts;   memory: plan beside measurement
//! view     all that the page says
//! page.html, page.css   how it looks: filled in by minijinja, which escapes every text
//! ```
//!
//! The page asks for nothing from outside and runs no script; samples and names in it are text, whatever they
//! hold. It says the same each time it is made from the same folder.

mod card;
mod chart;
mod files;
mod heat;
mod memory;
mod read;
mod series;
#[cfg(test)]
mod tests;
mod view;

pub use card::{card, is_hub_id};

use crate::error::{ExitCode, Failure};
use crate::store;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, UndefinedBehavior, context};
use std::path::{Path, PathBuf};

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder has no metrics.
    #[error(
        "cannot read {}: {source}\nhint: `ft report` takes the folder of a run: what `ft run` calls run.output, runs/NAME by default",
        path.display()
    )]
    NoMetrics {
        /// The file that is wanted.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The metrics hold no event.
    #[error("{}: no event of a run is in it; the file is empty, or another program's", path.display())]
    Nothing {
        /// The file.
        path: PathBuf,
    },
    /// A file that could not be read or written.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// The template failed: a bug of ours.
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
            Error::Page(_) => ExitCode::Internal,
        }
    }
}

/// Writes the report of the run in folder `run` to `out`, by default `report.html` in that folder; gives the
/// file's path.
///
/// # Errors
/// A folder without `metrics.jsonl`, one that holds no event, a file that cannot be written.
pub fn write(run: &Path, out: Option<&Path>) -> Result<PathBuf, Error> {
    let page = page(run)?;
    let out = out.map_or_else(|| run.join("report.html"), Path::to_path_buf);
    store::write_atomic(&out, page.as_bytes())?;
    Ok(out)
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
    render(&view)
}

fn render(view: &view::View) -> Result<String, Error> {
    let mut env = Environment::new();
    env.set_auto_escape_callback(|_| AutoEscape::Html);
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.add_template("page.css", include_str!("page.css"))?;
    env.add_template("parts.html", include_str!("parts.html"))?;
    env.add_template("page.html", include_str!("page.html"))?;
    Ok(env.get_template("page.html")?.render(context! { ..minijinja::Value::from(Serde(view)) })?)
}
