//! What can go wrong between a recipe's `[data]` and a batch.

use ft_base::error::{ExitCode, Failure, Place};
use std::path::PathBuf;

/// Problems of data, tokenizers and chat templates.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A part of the interface that does not exist yet, as `KEY = VALUE`.
    #[error("not built yet: {0}")]
    NotBuilt(String),
    /// The recipe asks for something that its data cannot give.
    #[error("{place}: {message}")]
    Recipe {
        /// The source's place in the recipe.
        place: Place,
        /// What, and what to write instead.
        message: String,
    },
    /// A data file or folder that is not there.
    #[error("data source {source_name:?}: {} is not there", path.display())]
    Missing {
        /// The source as the recipe spells it.
        source_name: String,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// Neither a file or folder of this machine nor a dataset of the hub.
    #[error("data source {source_name:?}: {} is not there, and as a dataset {cause}", path.display())]
    NoDataset {
        /// The source as the recipe spells it.
        source_name: String,
        /// Where it was looked for.
        path: PathBuf,
        /// What the hub said.
        cause: String,
    },
    /// A data file that cannot be read.
    #[error("cannot read {}: {cause}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        cause: std::io::Error,
    },
    /// A row that cannot be used.
    #[error("{place}: {problem}")]
    Row {
        /// File, line, and the byte column where there is one.
        place: Place,
        /// Why.
        problem: Problem,
    },
    /// A file or a source that leaves nothing to train on.
    #[error("{file}: {message}")]
    Empty {
        /// The file, or the source.
        file: String,
        /// What is missing.
        message: String,
    },
    /// A file of the model's tokenizer that cannot be used.
    #[error("{}: {message}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// Why, and what to do.
        message: String,
    },
    /// Tokens that cannot be written.
    #[error(transparent)]
    Write(#[from] ft_base::store::Error),
    /// A text that is too long to be tokenized in bounded memory.
    #[error("{0}")]
    TooLong(String),
    /// The data needs something that the model folder does not have.
    #[error("{0}")]
    ModelLacks(String),
    /// A chat template that does not parse, or that stops with an error.
    #[error("chat template {origin}{}: {message}", at_line(*line))]
    Template {
        /// The file that it comes from.
        origin: String,
        /// The template's line, from 1; 0 when the error has none.
        line: usize,
        /// What happened.
        message: String,
    },
}

fn at_line(line: usize) -> String {
    if line == 0 { String::new() } else { format!(", line {line}") }
}

/// Why a row is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// It is not what its format asks for.
    #[error("{0}")]
    Bad(String),
    /// The tokenizer breaks on its text; the message names the tokenizer's file.
    #[error("{0}")]
    Tokenizer(String),
    /// It is longer than `data.max_length` (with `over_length` = `"error"`, or dropped by `"drop"`).
    #[error(
        "{tokens} tokens are more than data.max_length = {max}{}",
        if *dropped { "" } else { "; raise it, or set data.over_length to \"truncate\" or \"drop\"" }
    )]
    TooLong {
        /// Its length.
        tokens: usize,
        /// The limit.
        max: usize,
        /// Whether the recipe asks for it to be left out.
        dropped: bool,
    },
    /// No token of it is supervised.
    #[error("nothing in this row is supervised: {0}")]
    EmptyMask(String),
    /// Cutting it to `data.max_length` left no supervised token.
    #[error(
        "empty mask after truncation: the first {max} of {tokens} tokens hold nothing that is supervised"
    )]
    EmptyAfterTruncation {
        /// Its length.
        tokens: usize,
        /// The limit.
        max: usize,
    },
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
            | Error::Empty { .. }
            | Error::TooLong(_) => ExitCode::Data,
            Error::Tokenizer { .. } | Error::ModelLacks(_) | Error::Template { .. } => ExitCode::Model,
        }
    }
}
