//! A configuration as a flat list of keys with values and lines.

use super::scalar::text;
use crate::syntax::join;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Values of a file at the most.
pub(in crate::import) const MOST: usize = 20_000;

/// Rounds of filling in values, and bytes of a filled value, at the most.
const ROUNDS: usize = 8;
const LONGEST: usize = 4096;

/// A key of the file, or a default of the tool.
#[derive(Clone, Debug)]
pub(in crate::import) struct Entry {
    /// Dotted path.
    pub path: String,
    /// A scalar, a list of scalars, or an empty table.
    pub value: Value,
    /// Line of the file; 0 for a default.
    pub line: usize,
}

/// The error of a key given twice.
pub(in crate::import) fn twice(key: &str, first: usize) -> String {
    format!("{key} is given twice, first in line {first}: leave one out")
}

/// All keys, in the file's order.
#[derive(Debug, Default)]
pub(in crate::import) struct Entries {
    pub list: Vec<Entry>,
}

impl Entries {
    /// Flattens a table.
    pub fn flat(table: &Map<String, Value>, lines: &BTreeMap<String, usize>) -> Self {
        let mut entries = Self::default();
        entries.add(table, "", lines, 0);
        entries.interpolate();
        entries.unfold();
        entries
    }

    fn add(
        &mut self,
        table: &Map<String, Value>,
        prefix: &str,
        lines: &BTreeMap<String, usize>,
        above: usize,
    ) {
        for (key, value) in table {
            let path = join(prefix, key);
            let line = lines.get(&path).copied().unwrap_or(above);
            match value {
                Value::Object(inner) if !inner.is_empty() => self.add(inner, &path, lines, line),
                Value::Array(list) if list.iter().any(Value::is_object) => {
                    let numbered = list.iter().enumerate().map(|(i, v)| (i.to_string(), v.clone())).collect();
                    self.add(&numbered, &path, lines, line);
                }
                value => self.list.push(Entry { path, value: value.clone(), line }),
            }
        }
    }

    /// Replaces `${a.b}` by the key's value, which may name further keys.
    fn interpolate(&mut self) {
        for _ in 0..ROUNDS {
            let known: BTreeMap<String, String> =
                self.list.iter().filter_map(|e| Some((e.path.clone(), text(&e.value)?))).collect();
            let mut changed = false;
            for entry in &mut self.list {
                if let Value::String(written) = &mut entry.value {
                    let out = filled(written, &known);
                    changed |= out != *written;
                    *written = out;
                }
            }
            if !changed {
                break;
            }
        }
    }

    /// Puts tables in place of their texts in JSON.
    pub fn unfold(&mut self) {
        for e in std::mem::take(&mut self.list) {
            match table_of(&e) {
                Some(table) if table.is_empty() => self.list.push(Entry { value: table.into(), ..e }),
                Some(table) => self.add(&table, &e.path, &BTreeMap::new(), e.line),
                None => self.list.push(e),
            }
        }
    }

    /// The value of a key; a default stands behind a null of the file.
    pub fn get(&self, path: &str) -> Option<&Value> {
        self.list.iter().filter(|e| e.path == path).map(|e| &e.value).find(|v| !v.is_null())
    }
}

/// The table in an entry's JSON text: `*_kwargs`, `optim_args`.
fn table_of(e: &Entry) -> Option<Map<String, Value>> {
    let text = e.value.as_str().filter(|_| e.path.ends_with("_kwargs") || e.path == "optim_args")?;
    serde_json::from_str(text).ok()
}

/// A text with the values of known keys in place of `${a.b}`.
fn filled(written: &str, known: &BTreeMap<String, String>) -> String {
    let mut parts = written.split("${");
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let value = part.split_once('}').and_then(|(key, rest)| Some((known.get(key)?, rest)));
        match value.filter(|(value, _)| out.len() + value.len() <= LONGEST) {
            Some((value, rest)) => out.extend([value.as_str(), rest]),
            None => out.extend(["${", part]),
        }
    }
    out
}
