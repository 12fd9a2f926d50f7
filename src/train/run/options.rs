//! Options and outcome of a run.

use crate::log::Observer;
use std::path::PathBuf;

/// Options of a run outside the recipe.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Resume from the newest whole checkpoint.
    pub resume: bool,
    /// Remove the leftovers of an earlier run.
    pub overwrite: bool,
    /// Recipe keys that may differ from the checkpoint.
    pub accept_change: Vec<String>,
    /// With `resume`: the step of the checkpoint; later ones are removed; `None` for the newest.
    pub step: Option<u64>,
    /// Executable to start as `ft serve` for `serve.devices`, namely `ft` itself.
    pub program: Option<PathBuf>,
    /// Function called with each event.
    pub observer: Option<Observer>,
}

/// Outcome of a run without errors.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The run trained and wrote a result.
    Done {
        /// Folder of the adapter or model.
        result: PathBuf,
    },
    /// The run was already finished.
    Already {
        /// Folder of the adapter or model.
        result: PathBuf,
    },
    /// This process ran a rank other than the first. The first rank holds the result.
    Followed,
}
