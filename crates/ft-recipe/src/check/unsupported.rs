//! Keys and values that `ft plan` accepts but `ft run` does not support yet.
//!
//! `ft run` rejects them by name instead of ignoring them. Removing an entry enables the key.

use crate::keys::{Unset, find_key};
use crate::syntax::{Diagnostic, MAX_PROBLEMS, SourceText, Table, Value, parse_value};
use std::collections::BTreeSet;

/// Keys rejected by `ft run`, with a word that is not supported, or `None` for any value but the default.
const NOT_BUILT: &[(&str, Option<&str>)] = &[
    #[cfg(not(feature = "mpi"))]
    ("parallel.comm", Some("mpi")),
];

/// Finds unsupported keys in `root`. Skips keys in `bad`, which already have a problem.
pub(crate) fn find(root: &Table, texts: &[SourceText], bad: &BTreeSet<String>) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    for (path, word) in NOT_BUILT {
        let Some(node) = root.find(path) else { continue };
        let is = |w: &str| matches!(&node.value, Value::Text(t) if t == w);
        let refused = match word {
            Some(w) => is(w),
            None => default_of(path).is_some_and(|d| d != node.value),
        };
        let inside = |b: &String| b.strip_prefix(path).is_some_and(|r| r.is_empty() || r.starts_with('.'));
        if refused && !bad.iter().any(inside) && found.len() < MAX_PROBLEMS {
            let message = format!("not built yet: {path} = {}", node.value);
            let hint = match default_of(path) {
                // The default is not MPI either, because few machines have the required libraries.
                _ if is("mpi") => "cargo build --release --features mpi (needs an MPI and libclang: \
                    libopenmpi-dev, openmpi-bin, libclang-dev)"
                    .into(),
                Some(default) => format!("leave it out, or write {path} = {default}"),
                None => "leave it out".into(),
            };
            found.push(Diagnostic::new(texts, &node.at, message).key(path).hint(hint));
        }
    }
    found
}

/// The default of the key at a dotted path, if any.
fn default_of(path: &str) -> Option<Value> {
    match find_key(path)?.default {
        Unset::Toml(text) => parse_value(text).map(|n| n.value),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Kind;

    /// Renamed keys must be renamed in `NOT_BUILT` too.
    #[test]
    fn every_line_names_a_key_and_what_it_can_hold() {
        for (path, word) in NOT_BUILT {
            let key = find_key(path).unwrap_or_else(|| panic!("no key {path}"));
            match word {
                Some(w) => match key.kind {
                    Kind::Word(words) => {
                        assert!(words.iter().any(|(x, _)| x == w), "{path} {w}");
                    }
                    other => panic!("{path} has no words: {other:?}"),
                },
                None => assert!(default_of(path).is_some(), "{path} has no default to differ from"),
            }
        }
    }
}
