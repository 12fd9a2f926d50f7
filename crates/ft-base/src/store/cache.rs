//! The cache folder of `ft`, for data reused between commands.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A path that was written with `~` for the folder `home`, as shells take it.
pub fn expand_home(written: &str, home: Option<&Path>) -> PathBuf {
    match (written.strip_prefix('~'), home) {
        (Some(""), Some(home)) => home.to_path_buf(),
        (Some(rest), Some(home)) if rest.starts_with('/') => home.join(rest.trim_start_matches('/')),
        _ => written.into(),
    }
}

/// `FT_CACHE`, else `ft` in `XDG_CACHE_HOME`, else `~/.cache/ft`; `None` if none of the variables is set.
///
/// Unit tests of this crate use only `FT_CACHE`, to leave the user's folder alone.
pub fn cache_folder() -> Option<PathBuf> {
    let var = |k: &str| std::env::var_os(k).filter(|v| !v.is_empty()).map(PathBuf::from);
    let named = var("FT_CACHE");
    if cfg!(test) {
        return named;
    }
    named
        .or_else(|| var("XDG_CACHE_HOME").map(|d| d.join("ft")))
        .or_else(|| var("HOME").map(|d| d.join(".cache/ft")))
}

/// Removes the oldest files of a folder beyond `most` files. Best effort.
pub fn sweep_oldest(dir: &Path, most: usize) {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<(SystemTime, PathBuf)> =
        entries.filter_map(|e| Some((e.metadata().ok()?.modified().ok()?, e.path()))).collect();
    found.sort_unstable();
    for (_, path) in found.iter().take(found.len().saturating_sub(most)) {
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tilde_stands_for_the_home_folder() {
        let at = |written: &str| expand_home(written, Some(Path::new("/h")));
        for (written, path) in
            [("~", "/h"), ("~/a/b", "/h/a/b"), ("~//a", "/h/a"), ("~a/b", "~a/b"), ("a/~", "a/~"), ("", "")]
        {
            assert_eq!(at(written), Path::new(path), "{written:?}");
        }
        assert_eq!(expand_home("~/a", None), Path::new("~/a"));
    }
}
