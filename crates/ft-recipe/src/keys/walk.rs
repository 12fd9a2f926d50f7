//! All keys by dotted path.

use super::kind::{Key, Kind};
use super::tables::Recipe;
use crate::syntax::join;
use std::sync::LazyLock;

/// A key with its dotted path.
type Entry = (String, &'static Key);

/// Every key with its dotted path, in documentation order. Lists of tables appear as entry 0 (`train.0`).
pub fn all_keys() -> &'static [Entry] {
    static ALL: LazyLock<Vec<Entry>> = LazyLock::new(|| {
        let mut all = Vec::new();
        add(Recipe::KEYS, "", &mut all);
        all
    });
    &ALL
}

fn add(keys: &'static [Key], prefix: &str, all: &mut Vec<Entry>) {
    for k in keys {
        let path = join(prefix, k.name);
        all.push((path.clone(), k));
        match k.kind {
            Kind::Table(inner) => add(inner, &path, all),
            Kind::Tables(inner) => add(inner, &format!("{path}.0"), all),
            _ => {}
        }
    }
}

/// The key at a dotted path, with any list index.
pub(crate) fn find_key(path: &str) -> Option<&'static Key> {
    let path = first_entries(path);
    all_keys().iter().find(|(known, _)| *known == path).map(|(_, key)| *key)
}

/// Replaces every list index of a dotted path by 0.
pub(crate) fn first_entries(path: &str) -> String {
    let parts = path.split('.').map(|p| if p.bytes().all(|b| b.is_ascii_digit()) { "0" } else { p });
    parts.collect::<Vec<_>>().join(".")
}
