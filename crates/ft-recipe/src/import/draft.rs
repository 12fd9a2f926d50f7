//! The recipe of an import: keys with values and origins.

use super::read::{number, text, truth};
use crate::keys::{Kind, Unset, all_keys, find_key, first_entries, of_json};
use crate::syntax::{Value as Toml, enclosing, parse_value, quote, quote_key};
use serde_json::Value;
use std::collections::BTreeMap;

/// One key of the recipe.
#[derive(Clone, Debug)]
pub(super) struct Set {
    pub path: String,
    /// TOML.
    pub value: String,
    /// The key of the other toolkit.
    pub origin: String,
    /// Whether the key is absent from the file.
    pub by_default: bool,
}

/// The keys so far; a later value of a path replaces an earlier one, but a default none of the file.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub keys: Vec<Set>,
}

impl Draft {
    pub fn set(&mut self, path: &str, value: String, origin: &str, by_default: bool) {
        if by_default && self.get(path).is_some_and(|s| !s.by_default) {
            return;
        }
        self.keys.retain(|s| s.path != path);
        self.keys.push(Set { path: path.into(), value, origin: origin.into(), by_default });
    }

    pub fn get(&self, path: &str) -> Option<&Set> {
        self.keys.iter().find(|s| s.path == path)
    }

    /// A list behind the key's present entries.
    pub fn joined(&self, path: &str, list: &str) -> String {
        let entries = |text: &str| match parse_value(text).map(|n| n.value) {
            Some(Toml::List(nodes)) => nodes,
            _ => Vec::new(),
        };
        let mut all = self.get(path).map(|s| entries(&s.value)).unwrap_or_default();
        for node in entries(list) {
            if !all.iter().any(|n| n.value == node.value) {
                all.push(node);
            }
        }
        Toml::List(all).to_string()
    }

    /// Removes the key named by a problem: an entry of a table, or the whole value around it. Returns the key.
    pub fn remove(&mut self, key: &str) -> Option<Set> {
        let i = enclosing(key).find_map(|path| self.keys.iter().position(|s| s.path == path))?;
        let entry = key[self.keys[i].path.len()..].trim_start_matches('.');
        Some(match without(&self.keys[i].value, entry) {
            Some(rest) => {
                self.keys[i].value = rest;
                self.keys[i].clone()
            }
            None => self.keys.remove(i),
        })
    }

    /// Drops defaults of the toolkit equal to ft's.
    pub fn drop_defaults(&mut self) {
        self.keys.retain(|s| {
            let ours = match find_key(&s.path).map(|k| k.default) {
                Some(Unset::Toml(text)) => parse_value(text).map(|n| n.value),
                _ => None,
            };
            let same = ours.is_some() && ours == parse_value(&s.value).map(|n| n.value);
            !(s.by_default && same)
        });
    }

    /// The recipe's text.
    pub fn text(&self, head: &str) -> String {
        let at = |path: &str| {
            let path = first_entries(path);
            all_keys().iter().position(|(known, _)| *known == path)
        };
        let mut tables: BTreeMap<(usize, usize, String), Vec<&Set>> = BTreeMap::new();
        for set in &self.keys {
            let table = set.path.rsplit_once('.').map_or("", |(t, _)| t);
            // entry 0 of a list of tables stands in the order of its keys
            let list = table.rsplit_once('.').and_then(|(list, i)| Some((list, i.parse::<usize>().ok()?)));
            let key = match list {
                Some((list, i)) => (at(list).unwrap_or(usize::MAX), i, format!("[[{list}]]")),
                // keys of no table stand before all tables
                None if table.is_empty() => (0, 0, String::new()),
                None => (at(table).unwrap_or(usize::MAX), 0, header(table)),
            };
            tables.entry(key).or_default().push(set);
        }
        let mut out = head.to_string();
        for ((.., header), mut sets) in tables {
            sets.sort_by_key(|s| at(&s.path).unwrap_or(usize::MAX));
            out += &if header.is_empty() { "\n".into() } else { format!("\n{header}\n") };
            for set in sets {
                let name = quote_key(set.path.rsplit('.').next().unwrap_or_default());
                let line = format!("{name} = {}", set.value);
                let default = if set.by_default { " (not in the file: its default)" } else { "" };
                out +=
                    &format!("{line:<35} # {}{default}\n", set.origin.replace(|c: char| c.is_control(), " "));
            }
        }
        out
    }
}

/// A table in TOML without an entry; `None` if it is no table, has no such entry, or has no other.
fn without(table: &str, entry: &str) -> Option<String> {
    let Toml::Table(mut table) = parse_value(table)?.value else { return None };
    let before = table.0.len();
    table.0.retain(|e| e.key != entry);
    (table.0.len() < before && !table.0.is_empty()).then(|| Toml::Table(table).to_string())
}

fn header(table: &str) -> String {
    let parts: Vec<String> = table.split('.').map(quote_key).collect();
    format!("[{}]", parts.join("."))
}

/// A number as TOML: whole ones without a point.
pub(super) fn number_text(x: f64) -> String {
    if x.fract() == 0.0 && x.abs() < 1e15 { format!("{}", x as i64) } else { format!("{x:?}") }
}

/// A value as the key at `path` takes it, by the key's kind: numbers and truths may be strings.
pub(super) fn fitting(path: &str, value: &Value) -> Result<String, String> {
    let wrong = |what: &str| Err(format!("{path} takes {what}"));
    match find_key(path).map(|k| k.kind) {
        Some(Kind::Int(..) | Kind::IntOrAuto(..) | Kind::Every(..)) => match number(value) {
            Some(x) if x.fract() == 0.0 && x >= 0.0 => Ok(number_text(x)),
            _ => wrong("a whole number"),
        },
        Some(Kind::Number(_)) => number(value).map(number_text).map_or_else(|| wrong("a number"), Ok),
        Some(Kind::Bool) => truth(value).map_or_else(|| wrong("true or false"), |b| Ok(b.to_string())),
        Some(Kind::Text | Kind::Name) => text(value).map_or_else(|| wrong("a text"), |t| Ok(quote(&t))),
        _ => of_json(value).map_or_else(|| wrong("another value"), Ok),
    }
}
