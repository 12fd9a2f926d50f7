//! Checks every key against the key table: names, kinds and ranges. Reports all problems at once.
//!
//! The result is complete: an absent or invalid key gets the default, and parsing and later checks go on.

use super::describe::{expected, found};
use super::values::Rejection;
use super::{parse, suggestions};
use crate::keys::{Checked, Key, Kind, Recipe, Section, Unset};
use crate::syntax::{
    Diagnostic, MAX_PROBLEMS, Node, SourceText, Span, Table, Value, join, parse_value, quote,
};
use std::collections::BTreeSet;

/// Collects the problems of one recipe.
pub(crate) struct Checker<'t> {
    pub texts: &'t [SourceText],
    pub problems: Vec<Diagnostic>,
    /// Paths with a problem. Checks across keys skip them.
    pub bad: BTreeSet<String>,
}

impl Checker<'_> {
    /// Adds a problem with the key at `path`.
    pub fn report(&mut self, at: &Span, path: &str, message: impl Into<String>, hints: &[String]) {
        if self.problems.len() >= MAX_PROBLEMS {
            return;
        }
        let d = Diagnostic::new(self.texts, at, message).key(path);
        self.problems.push(hints.iter().fold(d, |d, h| d.hint(h)));
        self.bad.insert(path.to_string());
    }

    /// Checks the whole recipe.
    pub fn root(&mut self, root: &Table) -> Section {
        self.table(root, Recipe::KEYS, "", &Span { text: 0, bytes: 0..0 })
    }

    fn table(&mut self, table: &Table, keys: &'static [Key], path: &str, at: &Span) -> Section {
        let mut meant = Vec::new();
        for e in &table.0 {
            if self.problems.len() < MAX_PROBLEMS && !keys.iter().any(|k| k.name == e.key) {
                let (message, hints) = suggestions::unknown(path, &e.key, keys);
                meant.extend(suggestions::meant(path, &e.key, keys));
                self.report(&e.key_at, &join(path, &e.key), message, &hints);
            }
        }
        let mut section = Section::default();
        for key in keys {
            let here = join(path, key.name);
            let checked = match table.get(key.name) {
                Some(node) => self.node(node, key, &here).or_else(|| self.absent(key, &here, at, true)),
                // Present, but misspelled.
                None if meant.contains(&key.name) => self.absent(key, &here, at, true),
                None => self.absent(key, &here, at, false),
            };
            if let Some(value) = checked {
                section.values.insert(key.name, value);
            }
        }
        section
    }

    /// The value for an absent key, or (`wrong`) for an invalid one already reported.
    fn absent(&mut self, key: &'static Key, path: &str, at: &Span, wrong: bool) -> Option<Checked> {
        match (key.default, key.kind) {
            (Unset::Required, Kind::Table(keys)) => Some(Checked::Table(if wrong {
                Section::default()
            } else {
                // Report the required keys inside the missing table.
                self.table(&Table::default(), keys, path, at)
            })),
            (Unset::Required, _) => {
                if !wrong {
                    let hints = vec![format!("{}: {}", key.name, key.doc)];
                    self.report(at, path, format!("missing key: {path}"), &hints);
                }
                None
            }
            (Unset::Absent(_), _) => None,
            (Unset::Toml(text), _) => {
                let node = parse_value(text)?;
                // Defaults are valid, as a test confirms.
                let mut quiet = Checker { texts: self.texts, problems: Vec::new(), bad: BTreeSet::new() };
                quiet.node(&node, key, path)
            }
        }
    }

    fn node(&mut self, node: &Node, key: &'static Key, path: &str) -> Option<Checked> {
        let checked = match (key.kind, &node.value) {
            (Kind::Table(keys), Value::Table(t)) => {
                return Some(Checked::Table(self.table(t, keys, path, &node.at)));
            }
            (Kind::Tables(keys), Value::List(list)) => return self.tables(list, keys, path),
            (Kind::Modules, Value::List(list)) if list.is_empty() => {
                self.report(&node.at, path, format!("{path} is empty: the rule would match nothing"), &[]);
                return Some(Checked::Texts(Vec::new()));
            }
            (Kind::Words(_) | Kind::Texts | Kind::Modules | Kind::Devices, Value::List(list)) => {
                return Some(self.texts(list, key.kind, path));
            }
            (kind, value) => parse::parse(kind, value, path),
        };
        match checked {
            Ok(v) => Some(v),
            Err(Rejection { message, hints }) => {
                let message = message.unwrap_or_else(|| {
                    format!("{path} takes {}, not {}", expected(key.kind), found(&node.value))
                });
                self.report(&node.at, path, message, &hints);
                None
            }
        }
    }

    fn tables(&mut self, list: &[Node], keys: &'static [Key], path: &str) -> Option<Checked> {
        let mut sections = Vec::new();
        for (i, node) in list.iter().enumerate() {
            if self.problems.len() >= MAX_PROBLEMS {
                break;
            }
            let here = format!("{path}.{i}");
            match &node.value {
                Value::Table(t) => sections.push(self.table(t, keys, &here, &node.at)),
                other => {
                    let message = format!("{here} takes a table, not {}", found(other));
                    self.report(&node.at, &here, message, &[]);
                }
            }
        }
        Some(Checked::Tables(sections))
    }

    /// Checks a list of distinct strings, entry by entry.
    fn texts(&mut self, list: &[Node], kind: Kind, path: &str) -> Checked {
        let mut good = Vec::new();
        for (i, node) in list.iter().enumerate() {
            let here = format!("{path}.{i}");
            match parse::entry(kind, &node.value, path) {
                Ok(text) if good.contains(&text) => {
                    self.report(&node.at, &here, format!("{path} has {} twice", quote(&text)), &[]);
                }
                Ok(text) => good.push(text),
                Err(Rejection { message, hints }) => {
                    let generic = || format!("{here} takes a string, not {}", found(&node.value));
                    self.report(&node.at, &here, message.unwrap_or_else(generic), &hints);
                }
            }
        }
        Checked::Texts(good)
    }
}
