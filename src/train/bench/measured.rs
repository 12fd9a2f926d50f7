//! Result of a benchmark.

use serde_json::Value;
use std::path::PathBuf;

/// Result of a benchmark.
#[derive(Debug)]
pub struct Measured {
    /// Output with `--json`.
    pub json: Value,
    /// Output without.
    pub text: String,
    /// File of the rates, read by later plans.
    pub kept: Option<PathBuf>,
}
