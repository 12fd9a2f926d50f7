//! A configuration as a flat list of keys with values and lines.

use super::scalar::text;
use crate::syntax::join;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Values of a file at the most.
pub(in crate::import) const MOST: usize = 20_000;

/// A key of the file, or a default of its tool.
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

    /// Replaces `${a.b}` by the value of that key.
    fn interpolate(&mut self) {
        let known: BTreeMap<String, String> =
            self.list.iter().filter_map(|e| Some((e.path.clone(), text(&e.value)?))).collect();
        for entry in &mut self.list {
            if let Value::String(written) = &mut entry.value {
                let parts: Vec<&str> = written.split("${").collect();
                let mut out = parts[0].to_string();
                for part in &parts[1..] {
                    let filled =
                        part.split_once('}').and_then(|(key, rest)| Some(known.get(key)?.clone() + rest));
                    out += &filled.unwrap_or_else(|| format!("${{{part}"));
                }
                *written = out;
            }
        }
    }

    pub fn get(&self, path: &str) -> Option<&Value> {
        self.list.iter().find(|e| e.path == path).map(|e| &e.value).filter(|v| !v.is_null())
    }
}
