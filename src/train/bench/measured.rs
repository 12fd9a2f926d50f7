//! Result of a benchmark.

use ft_base::store;
use ft_base::terminal::warn;
use serde_json::Value;
use std::path::PathBuf;
use std::time::SystemTime;

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

/// The time, UTC, as in RFC 3339.
pub fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// The file of saved rates, or a warning if there is none: the result is still the caller's.
pub fn kept(saved: Result<Option<PathBuf>, store::Error>) -> Option<PathBuf> {
    let hint = "plans do without them\n  hint: FT_CACHE names another folder";
    match saved {
        Ok(Some(path)) => return Some(path),
        Ok(None) => warn(&format!("the rates are not kept: no cache folder; {hint}")),
        Err(e) => warn(&format!("the rates are not kept: {e}; {hint}")),
    }
    None
}
