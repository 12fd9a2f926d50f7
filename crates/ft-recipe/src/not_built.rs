//! Keys and values that the interface has and `ft run` does not build yet.
//!
//! They are refused by name, never accepted and ignored. Taking a line out enables the key. `ft plan` plans
//! for them all.

use super::kind::{self, Unset};
use super::report::{Diagnostic, MOST, Text};
use super::tree::{Table, Value};
use std::collections::BTreeSet;

/// What of a key is not built.
enum What {
    /// This word.
    #[cfg_attr(feature = "mpi", expect(dead_code, reason = "all words are built"))]
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
    #[cfg(not(feature = "mpi"))]
    ("parallel.comm", Word("mpi")),
];

/// The keys of `root` that `ft run` does not build.
///
/// Nothing is said about those in `bad`: they have a problem already.
pub(super) fn find(root: &Table, texts: &[Text], bad: &BTreeSet<String>) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    for (path, what) in NOT_BUILT {
        let Some(node) = root.find(path) else { continue };
        let is = |w: &str| matches!(&node.value, Value::Text(t) if t == w);
        let refused = match what {
            Word(w) => is(w),
            Changed => default_of(path).is_some_and(|d| d != node.value),
        };
        let inside = |b: &String| b.strip_prefix(path).is_some_and(|r| r.is_empty() || r.starts_with('.'));
        if refused && !bad.iter().any(inside) && found.len() < MOST {
            let message = format!("not built yet: {path} = {}", node.value);
            let hint = match default_of(path) {
                // nor is it, until it is asked for: it needs libraries that few machines have
                _ if is("mpi") => "cargo build --release --features mpi (needs an MPI and libclang: libopenmpi-dev, openmpi-bin, libclang-dev)".into(),
                Some(default) => format!("leave it out, or write {path} = {default}"),
                None => "leave it out".into(),
            };
            found.push(Diagnostic::new(texts, &node.at, message).key(path).hint(hint));
        }
    }
    found
}

/// The default of a key.
fn default_of(path: &str) -> Option<Value> {
    let mut found = None;
    kind::each(&mut |p, key| {
        if p == path
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
        for (path, what) in NOT_BUILT {
            let mut found = None;
            kind::each(&mut |p, key| {
                if p == *path {
                    found = Some(key);
                }
            });
            let key = found.unwrap_or_else(|| panic!("no key {path}"));
            match what {
                Word(w) => match key.kind {
                    kind::Kind::Word(words) => {
                        assert!(words.iter().any(|(x, _)| x == w), "{path} {w}");
                    }
                    other => panic!("{path} has no words: {other:?}"),
                },
                Changed => assert!(default_of(path).is_some(), "{path} has no default to differ from"),
            }
        }
    }
}
