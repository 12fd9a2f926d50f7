//! Keys and values that the interface has and `ft run` does not build yet.
//!
//! They are refused by name, never accepted and ignored. Taking a line out enables the key. `ft plan` plans
//! for them all.

use super::kind::{self, Unset};
use super::report::{Diagnostic, MOST, Text};
use super::tree::{Node, Table, Value};
use std::collections::BTreeSet;

/// What of a key is not built.
enum What {
    /// This word.
    Word(&'static str),
    /// Anything but its default.
    Changed,
}

use What::{Changed, Word};

/// What `ft run` refuses.
const NOT_BUILT: &[(&str, What)] = &[
    ("parallel.tensor", Changed),
    ("parallel.pipeline", Changed),
    ("parallel.expert", Changed),
    ("parallel.context", Changed),
    ("parallel.comm", Word("nccl")),
    #[cfg(not(feature = "mpi"))]
    ("parallel.comm", Word("mpi")),
];

/// The keys of `root` that `ft run` does not build.
///
/// Nothing is said about those in `bad`: they have a problem already.
pub(super) fn find(root: &Table, texts: &[Text], bad: &BTreeSet<String>) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    for (pattern, what) in NOT_BUILT {
        for (path, node) in matches(root, pattern) {
            let is = |n: &Node, w: &str| matches!(&n.value, Value::Text(t) if t == w);
            let refused = match what {
                Word(w) => is(node, w),
                Changed => default_of(&path).is_some_and(|d| d != node.value),
            };
            let inside =
                |b: &String| b.strip_prefix(&path).is_some_and(|r| r.is_empty() || r.starts_with('.'));
            if refused && !bad.iter().any(inside) && found.len() < MOST {
                let message = format!("not built yet: {path} = {}", node.value);
                let mut d = Diagnostic::new(texts, &node.at, message).key(&path);
                if is(node, "mpi") {
                    // nor is it, until it is asked for: it needs libraries that few machines have
                    d = d.hint("cargo build --release --features mpi (needs an MPI and libclang: libopenmpi-dev, openmpi-bin, libclang-dev)");
                } else if let Some(default) = default_of(&path) {
                    d = d.hint(format!("leave it out, or write {path} = {default}"));
                } else {
                    d = d.hint("leave it out");
                }
                found.push(d);
            }
        }
    }
    found
}

/// The nodes at `pattern`, with their paths.
fn matches<'t>(root: &'t Table, pattern: &str) -> Vec<(String, &'t Node)> {
    let Some((list, key)) = pattern.split_once(".*.") else {
        return root.find(pattern).map(|n| (pattern.to_string(), n)).into_iter().collect();
    };
    let count = match root.find(list) {
        Some(Node { value: Value::List(l), .. }) => l.len(),
        _ => 0,
    };
    (0..count)
        .filter_map(|i| {
            let path = format!("{list}.{i}.{key}");
            root.find(&path).map(|n| (path.clone(), n))
        })
        .collect()
}

/// The default of a key, of the first entry where it stands in a list.
fn default_of(path: &str) -> Option<Value> {
    let first: Vec<&str> =
        path.split('.').map(|p| if p.bytes().all(|b| b.is_ascii_digit()) { "0" } else { p }).collect();
    let (first, mut found) = (first.join("."), None);
    kind::each(&mut |p, key| {
        if p == first
            && let Unset::Toml(text) = key.default
        {
            found = super::check::default_node(text).map(|n| n.value);
        }
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key that is renamed must be renamed here too.
    #[test]
    fn every_line_names_a_key_and_what_it_can_hold() {
        for (pattern, what) in NOT_BUILT {
            let path = pattern.replace('*', "0");
            let mut found = None;
            kind::each(&mut |p, key| {
                if p == path {
                    found = Some(key);
                }
            });
            let key = found.unwrap_or_else(|| panic!("no key {pattern}"));
            match what {
                Word(w) => match key.kind {
                    kind::Kind::Word(words) => {
                        assert!(words.iter().any(|(x, _)| x == w), "{pattern} {w}");
                    }
                    other => panic!("{pattern} has no words: {other:?}"),
                },
                Changed => assert!(default_of(&path).is_some(), "{pattern} has no default to differ from"),
            }
        }
    }
}
