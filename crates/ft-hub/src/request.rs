//! Requests to the hub, and results.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;

/// Required parts of a model; every level includes the previous ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Want {
    /// `config.json` and `generation_config.json`.
    Config,
    /// Also tokenizer and chat template.
    Tokenizer,
    /// Also the weights.
    Weights,
}

/// A model folder on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelDir {
    /// The local folder as given, or a snapshot in the hub cache.
    pub dir: PathBuf,
    /// The source as given.
    pub source: String,
    /// The commit, for models from the hub.
    pub revision: Option<String>,
    /// Messages for the user, e.g. if the hub was unreachable and the cache was used.
    pub notes: Vec<String>,
}

/// Kind of download: a model up to some level, or an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Model(Want),
    Adapter,
}

/// A hub dataset as given in a recipe.
#[derive(Clone, Copy, Debug)]
pub struct DatasetName<'a> {
    /// `OWNER/NAME`.
    pub id: &'a str,
    /// Branch, tag or commit.
    pub revision: &'a str,
    /// Config; `None` selects the default or only config.
    pub config: Option<&'a str>,
    /// Split; `None` selects the only split.
    pub split: Option<&'a str>,
}

/// Dataset files on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetFiles {
    /// Paths of the selected files, sorted by name.
    pub files: Vec<PathBuf>,
    /// Messages for the user, e.g. if the hub was unreachable and the cache was used.
    pub notes: Vec<String>,
}

/// Contents of a dataset repository at a commit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Layout {
    pub commit: String,
    /// Paths and sizes.
    pub files: Vec<(String, u64)>,
    /// `configs` of the dataset card.
    pub configs: Value,
}

/// An upload as a single commit.
#[derive(Clone, Debug)]
pub struct Push {
    /// `OWNER/NAME`; created if missing.
    pub repository: String,
    /// Branch; created if missing.
    pub revision: String,
    /// Whether to create the repository as private, else as public; an existing one keeps its visibility.
    pub private: bool,
    /// Commit message.
    pub message: String,
    /// Names in the repository, and local paths.
    pub files: Vec<(String, PathBuf)>,
    /// Names and contents of generated files.
    pub texts: Vec<(String, String)>,
}
