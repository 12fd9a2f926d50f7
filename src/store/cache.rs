//! The folder of what `ft` keeps for itself between commands.

use std::path::PathBuf;

/// `FT_CACHE`, else `ft` in `XDG_CACHE_HOME`, else `~/.cache/ft`; `None` where none of them is set.
///
/// Unit tests see `FT_CACHE` alone: they must not write into their user's folder.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    let var = |k: &str| std::env::var_os(k).filter(|v| !v.is_empty()).map(PathBuf::from);
    let named = var("FT_CACHE");
    if cfg!(test) {
        return named;
    }
    named
        .or_else(|| var("XDG_CACHE_HOME").map(|d| d.join("ft")))
        .or_else(|| var("HOME").map(|d| d.join(".cache/ft")))
}
