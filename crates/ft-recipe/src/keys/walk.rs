//! Visits all keys by dotted path.

use super::kind::{Key, Kind};
use super::tables::Recipe;
use crate::syntax::join;

/// Calls `f` with the dotted path of every key. Lists of tables appear as entry 0 (`train.0`).
pub fn each_key(f: &mut dyn FnMut(&str, &'static Key)) {
    walk(Recipe::KEYS, "", f);
}

fn walk(keys: &'static [Key], prefix: &str, f: &mut dyn FnMut(&str, &'static Key)) {
    for k in keys {
        let path = join(prefix, k.name);
        f(&path, k);
        match k.kind {
            Kind::Table(inner) => walk(inner, &path, f),
            Kind::Tables(inner) => walk(inner, &format!("{path}.0"), f),
            _ => {}
        }
    }
}

/// The key at a dotted path, with any list index.
pub(crate) fn find_key(path: &str) -> Option<&'static Key> {
    let path = first_entries(path);
    let mut found = None;
    each_key(&mut |p, key| {
        if p == path {
            found = Some(key);
        }
    });
    found
}

/// Replaces every list index of a dotted path by 0.
pub(crate) fn first_entries(path: &str) -> String {
    let parts = path.split('.').map(|p| if p.bytes().all(|b| b.is_ascii_digit()) { "0" } else { p });
    parts.collect::<Vec<_>>().join(".")
}
