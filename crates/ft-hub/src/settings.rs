//! Hub settings from the environment.

use ft_base::store;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Hub URL, cache folder, credentials and time limit. Variables and precedence follow the Python package
/// `huggingface_hub`; paths may have a leading `~`, and variables as `$NAME` or `${NAME}`.
#[derive(Clone, PartialEq, Eq)]
pub struct Settings {
    /// URL of the hub: `HF_ENDPOINT`.
    pub endpoint: String,
    /// The cache folder: `HF_HUB_CACHE`, else `HUGGINGFACE_HUB_CACHE`, else `$HF_HOME/hub`. `HF_HOME`
    /// defaults to `$XDG_CACHE_HOME/huggingface`, and `XDG_CACHE_HOME` to `~/.cache`.
    pub cache: PathBuf,
    /// The token: `HF_TOKEN`, else `HUGGING_FACE_HUB_TOKEN`, else the file `HF_TOKEN_PATH`, else
    /// `$HF_HOME/token`. `None` if `HF_HUB_DISABLE_IMPLICIT_TOKEN` is set.
    pub token: Option<String>,
    /// Offline mode: `HF_HUB_OFFLINE`, or `TRANSFORMERS_OFFLINE`.
    pub offline: bool,
    /// How long the hub may stay silent while it is read: `HF_HUB_DOWNLOAD_TIMEOUT` in seconds, else a minute.
    pub timeout: Duration,
    /// The home folder, for `~`.
    pub home: Option<PathBuf>,
}

impl Settings {
    /// Reads the environment of this process.
    pub fn from_env() -> Settings {
        Settings::from_lookup(|name| std::env::var(name).ok())
    }

    /// As [`Settings::from_env`], with a custom lookup. Empty values count as unset.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Settings {
        let get = |name: &str| lookup(name).filter(|v| !v.is_empty());
        let home = get("HOME").map(PathBuf::from);
        let path = |name: &str| get(name).map(|text| expand(&text, home.as_deref(), &lookup));
        let hf_home = path("HF_HOME").unwrap_or_else(|| {
            path("XDG_CACHE_HOME")
                .or_else(|| Some(home.as_ref()?.join(".cache")))
                .unwrap_or_else(std::env::temp_dir)
                .join("huggingface")
        });
        let trimmed = |text: String| Some(text.trim().to_string()).filter(|t| !t.is_empty());
        let read = |path: &Path| store::read_plain_text(path, 1 << 20).ok().and_then(trimmed);
        let token = if is_true(get("HF_HUB_DISABLE_IMPLICIT_TOKEN")) {
            None
        } else {
            get("HF_TOKEN")
                .or_else(|| get("HUGGING_FACE_HUB_TOKEN"))
                .and_then(trimmed)
                .or_else(|| read(&path("HF_TOKEN_PATH")?))
                .or_else(|| read(&hf_home.join("token")))
        };
        let seconds = get("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|s| s.parse::<u64>().ok()).filter(|s| *s > 0);
        Settings {
            endpoint: get("HF_ENDPOINT")
                .unwrap_or_else(|| "https://huggingface.co".to_string())
                .trim_end_matches('/')
                .to_string(),
            cache: path("HF_HUB_CACHE")
                .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
                .unwrap_or_else(|| hf_home.join("hub")),
            token,
            offline: is_true(get("HF_HUB_OFFLINE").or_else(|| get("TRANSFORMERS_OFFLINE"))),
            timeout: Duration::from_secs(seconds.unwrap_or(60)),
            home,
        }
    }
}

/// Hides the token from logs and panic messages.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("cache", &self.cache)
            .field("token", &self.token.as_ref().map(|_| "set"))
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

/// Replaces a leading `~`, and variables that are set, as Python's `expanduser` and `expandvars` do.
fn expand(text: &str, home: Option<&Path>, lookup: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    let text = store::expand_home(text, home).to_string_lossy().into_owned();
    let mut parts = text.split('$');
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let (name, rest) = match part.strip_prefix('{') {
            Some(braced) => braced.split_once('}').unwrap_or_default(),
            None => {
                let ends = |c: char| !c.is_ascii_alphanumeric() && c != '_';
                part.split_at(part.find(ends).unwrap_or(part.len()))
            }
        };
        match Some(name).filter(|n| !n.is_empty()).and_then(lookup) {
            Some(value) => out += &(value + rest),
            None => out += &format!("${part}"),
        }
    }
    out.into()
}

fn is_true(value: Option<String>) -> bool {
    value.is_some_and(|v| ["1", "true", "yes", "on"].contains(&v.to_lowercase().as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Settings {
        Settings::from_lookup(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    #[test]
    fn settings_have_the_order_of_huggingface_hub() {
        let s = of(&[("HOME", "/h")]);
        assert_eq!(s.endpoint, "https://huggingface.co");
        assert_eq!(s.cache, Path::new("/h/.cache/huggingface/hub"));
        assert!(!s.offline && s.token.is_none());
        let s = of(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]);
        assert_eq!(s.cache, Path::new("/x/huggingface/hub"));
        let s = of(&[("HF_HOME", "/f"), ("XDG_CACHE_HOME", "/x"), ("HF_ENDPOINT", "http://m/")]);
        assert_eq!(s.cache, Path::new("/f/hub"));
        assert_eq!(s.endpoint, "http://m");
        let s = of(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c"), ("HF_HUB_OFFLINE", "ON")]);
        assert_eq!(s.cache, Path::new("/c"));
        assert!(s.offline);
        assert!(!of(&[("HF_HUB_OFFLINE", "0")]).offline);
        assert!(of(&[("TRANSFORMERS_OFFLINE", "1")]).offline);
        let timeout = |text| of(&[("HF_HUB_DOWNLOAD_TIMEOUT", text)]).timeout.as_secs();
        assert_eq!(["7", "0", "", "soon"].map(timeout), [7, 60, 60, 60]);
    }

    #[test]
    fn the_token_is_found_and_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "hf_file\n").unwrap();
        let home = dir.path().to_str().unwrap();
        assert_eq!(of(&[("HF_HOME", home)]).token.as_deref(), Some("hf_file"));
        let s = of(&[("HF_HOME", home), ("HF_TOKEN", "hf_variable")]);
        assert_eq!(s.token.as_deref(), Some("hf_variable"));
        let shown = format!("{s:?}");
        assert!(shown.contains("token: Some(\"set\")") && !shown.contains("hf_variable"), "{shown}");
        let old = ("HUGGING_FACE_HUB_TOKEN", "hf_old");
        assert_eq!(of(&[("HF_HOME", home), old]).token.as_deref(), Some("hf_old"));
        assert_eq!(of(&[("HF_TOKEN", "hf_new"), old]).token.as_deref(), Some("hf_new"));
        assert_eq!(of(&[("HF_HOME", home), ("HF_TOKEN", " \n")]).token.as_deref(), Some("hf_file"));
        assert_eq!(of(&[("HF_HOME", "/f"), ("HF_TOKEN", " ")]).token, None);
        let s = of(&[("HOME", home), ("HF_TOKEN_PATH", "~/token")]);
        assert_eq!(s.token.as_deref(), Some("hf_file"));
        let s = of(&[("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]);
        assert_eq!(s.token, None);
    }

    #[test]
    fn paths_have_home_and_variables_filled_in() {
        let cache = |name, path| of(&[("HOME", "/h"), ("DISK", "/d"), ("EMPTY", ""), (name, path)]).cache;
        assert_eq!(cache("HF_HOME", "~/f"), Path::new("/h/f/hub"));
        assert_eq!(cache("HF_HOME", "$DISK/f"), Path::new("/d/f/hub"));
        for (path, wanted) in [
            ("~", "/h"),
            ("~other/c", "~other/c"),
            ("a~", "a~"),
            ("${DISK}c$EMPTY$HOME", "/dc/h"),
            ("$DISKS/c", "$DISKS/c"),
            ("/c$", "/c$"),
            ("/${DISK", "/${DISK"),
            ("${}$-", "${}$-"),
        ] {
            assert_eq!(cache("HF_HUB_CACHE", path), Path::new(wanted), "{path}");
        }
    }
}
