//! Detection of YAML files.

use crate::syntax::{Diagnostic, SourceText, Span};
use std::path::Path;

/// Detects a YAML file, for a single clear message instead of many TOML errors.
pub(super) fn yaml(texts: &[SourceText], path: &Path) -> Option<Diagnostic> {
    let named = path.extension().is_some_and(|e| e == "yaml" || e == "yml");
    let lines =
        || texts[0].text.lines().map(str::trim_end).filter(|l| !l.trim().is_empty() && !l.starts_with('#'));
    let is_key = |l: &str| {
        let (key, rest) = l.split_once(':')?;
        let plain = key.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b));
        Some(!key.is_empty() && plain && (rest.is_empty() || rest.starts_with(' ')))
    };
    let looks = || {
        lines().next().is_some_and(|l| l == "---" || is_key(l) == Some(true))
            && !lines().any(|l| l.contains(" = "))
    };
    if !(looks() || named && !lines().any(|l| l.starts_with('['))) {
        return None;
    }
    let at = Span { text: 0, bytes: 0..1 };
    let d = Diagnostic::new(texts, &at, "this is YAML, and a recipe is TOML: key = value, tables as [data]");
    Some(d.hint(
        "ft import FILE makes a recipe of a configuration of axolotl, LLaMA-Factory, torchtune or TRL; ft init \
         asks for what a recipe needs",
    ))
}
