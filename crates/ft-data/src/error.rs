//! Errors of the data pipeline.

use ft_base::error::{ExitCode, Failure, Location};
use ft_base::terminal::plural;
use std::path::{Path, PathBuf};

/// Errors of data files, tokenizers and chat templates.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An unimplemented feature, as `KEY = VALUE`.
    #[error("not built yet: {0}")]
    NotBuilt(String),
    /// A setting that does not match the data.
    #[error("{place}: {message}")]
    Recipe {
        /// Place of the source in the recipe.
        place: Location,
        /// The problem and a remedy.
        message: String,
    },
    /// A missing data file or folder.
    #[error("data source {source_name:?}: {} is not there", path.display())]
    Missing {
        /// The source as written in the recipe.
        source_name: String,
        /// The resolved path.
        path: PathBuf,
    },
    /// Neither a local path nor a hub dataset.
    #[error("data source {source_name:?}: {} is not there, and as a dataset {cause}", path.display())]
    NoDataset {
        /// The source as written in the recipe.
        source_name: String,
        /// The resolved path.
        path: PathBuf,
        /// The error from the hub.
        cause: String,
    },
    /// An unreadable data file.
    #[error("cannot read {}: {cause}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The I/O error.
        cause: std::io::Error,
    },
    /// A bad row, and further rows with the same problem.
    #[error("{}", bad_row(place, problem, more))]
    Row {
        /// File, line, and byte column if known.
        place: Location,
        /// The problem.
        problem: Problem,
        /// Places of further rows.
        more: Others,
    },
    /// A file with an unusable beginning.
    #[error("{place}: {message}")]
    File {
        /// File and line.
        place: Location,
        /// The problem and a remedy.
        message: String,
    },
    /// A source that loses too many rows.
    #[error("{name}: {message}")]
    LeftOut {
        /// The source as written in the recipe.
        name: String,
        /// Counts, reasons and a remedy.
        message: String,
    },
    /// A file or source without usable rows.
    #[error("{file}: {message}")]
    Empty {
        /// The file or source.
        file: String,
        /// What is missing.
        message: String,
    },
    /// An invalid tokenizer file, or `ft.json`.
    #[error("{}: {message}", path.display())]
    Tokenizer {
        /// Path of the file.
        path: PathBuf,
        /// The problem and a remedy.
        message: String,
    },
    /// A failure to write tokens.
    #[error(transparent)]
    Write(#[from] ft_base::store::Error),
    /// A text too long to tokenize in bounded memory.
    #[error("{0}")]
    TooLong(String),
    /// Something missing from the model folder.
    #[error("{0}")]
    ModelLacks(String),
    /// A chat template that does not parse or raises an error.
    #[error("chat template {origin}{}: {message}", at_line(*line))]
    Template {
        /// The template file.
        origin: String,
        /// Line of the template, from 1; 0 if unknown.
        line: usize,
        /// The error message.
        message: String,
    },
}

impl Error {
    pub(crate) fn read(path: &Path, cause: std::io::Error) -> Self {
        Error::Read { path: path.into(), cause }
    }

    pub(crate) fn recipe(source: &ft_recipe::Source, message: String) -> Self {
        Error::Recipe { place: source.place.clone(), message }
    }

    pub(crate) fn tokenizer(path: &Path, message: impl Into<String>) -> Self {
        Error::Tokenizer { path: path.into(), message: message.into() }
    }
}

fn at_line(line: usize) -> String {
    if line == 0 { String::new() } else { format!(", line {line}") }
}

/// Further rows with the same problem.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Others {
    /// Number of rows.
    count: usize,
    /// The first places.
    places: Vec<Location>,
}

/// Places of further rows in an error message.
const PLACES: usize = 4;

/// The message of a bad row: the problem, further rows, and the key to leave bad rows out.
fn bad_row(place: &Location, problem: &Problem, more: &Others) -> String {
    let text = problem.to_string();
    let (what, hints) = text.split_at(text.find('\n').unwrap_or(text.len()));
    let mut out = format!("{place}: {what}");
    if more.count > 0 {
        let rows = plural(more.count, "more row");
        let places: Vec<String> = more.places.iter().map(Location::to_string).collect();
        let and = if more.count > places.len() { ", ..." } else { "" };
        out += &format!("\n  and {rows} like it: {}{and}", places.join(", "));
    }
    out += hints;
    if matches!(problem, Problem::Bad(_) | Problem::EmptyMask(_)) {
        out += "\n  hint: data.on_bad_row = \"skip\" leaves such rows out, and counts them";
    }
    out
}

/// Reason for dropping a row.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// Invalid for the format.
    #[error("{0}")]
    Bad(String),
    /// A tokenizer failure; the message names the tokenizer file.
    #[error("{0}")]
    Tokenizer(String),
    /// Longer than `data.max_length` (`over_length` is `"error"`, or `"drop"`).
    #[error(
        "{tokens} tokens are more than data.max_length = {max}{}",
        if *dropped { "" } else { "; raise it, or set data.over_length to \"truncate\", \"drop\" or \"split\"" }
    )]
    TooLong {
        /// Length in tokens.
        tokens: usize,
        /// The limit, in tokens.
        max: usize,
        /// Whether the recipe asks to drop long samples.
        dropped: bool,
    },
    /// No targets.
    #[error("nothing in this row is supervised: {0}")]
    EmptyMask(String),
    /// No targets left after truncation to `data.max_length`.
    #[error(
        "empty mask after truncation: the first {max} of {tokens} tokens hold nothing that is supervised"
    )]
    EmptyAfterTruncation {
        /// Length in tokens.
        tokens: usize,
        /// The limit, in tokens.
        max: usize,
    },
}

impl Problem {
    /// Whether two problems differ in numbers at most.
    fn is_like(&self, other: &Self) -> bool {
        let words = |p: &Self| p.to_string().replace(|c: char| c.is_ascii_digit(), "");
        std::mem::discriminant(self) == std::mem::discriminant(other) && words(self) == words(other)
    }
}

/// Problems of rows and sources: collected up to a limit, or the first one stops.
#[derive(Debug, Default)]
pub(crate) struct Problems {
    /// Maximum number of problems to collect; `None` stops at the first.
    pub limit: Option<usize>,
    /// The first problems, in order.
    pub first: Vec<Error>,
    /// Number of further problems.
    pub more: usize,
}

impl Problems {
    /// Adds a problem; rows with the same problem become one.
    pub fn add(&mut self, problem: Error) {
        if let Error::Row { place, problem: new, .. } = &problem {
            let like = self.first.iter_mut().find_map(|e| match e {
                Error::Row { problem, more, .. } if problem.is_like(new) => Some(more),
                _ => None,
            });
            if let Some(more) = like {
                more.count += 1;
                if more.places.len() < PLACES {
                    more.places.push(place.clone());
                }
                return;
            }
        }
        if self.first.len() < self.limit.unwrap_or(0) {
            self.first.push(problem);
        } else {
            self.more += 1;
        }
    }

    pub fn is_empty(&self) -> bool {
        self.first.is_empty() && self.more == 0
    }
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::NotBuilt(_) | Error::Recipe { .. } => ExitCode::Usage,
            Error::Row { problem: Problem::Tokenizer(_), .. } => ExitCode::Model,
            Error::Write(e) => e.exit_code(),
            Error::Missing { .. }
            | Error::NoDataset { .. }
            | Error::Read { .. }
            | Error::Row { .. }
            | Error::File { .. }
            | Error::LeftOut { .. }
            | Error::Empty { .. }
            | Error::TooLong(_) => ExitCode::Data,
            Error::Tokenizer { .. } | Error::ModelLacks(_) | Error::Template { .. } => ExitCode::Model,
        }
    }
}
