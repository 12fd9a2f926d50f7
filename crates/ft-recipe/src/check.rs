//! Checks every key against the key table: names, kinds and ranges. Reports all problems at once.
//!
//! The result is complete: an absent or invalid key gets the default, so that parsing continues and
//! later checks can run.

use super::keys::Recipe;
use super::kind::{INDEX, Key, Kind, Unset};
use super::names;
use super::report::{At, Diagnostic, MOST, Text};
use super::tree::{Node, Table, Value, join, quote};
use super::types::{IndexSet, LayerSet, OneDevice, Recompute, Token};
use super::values;
use ft_base::error::Place;
use std::collections::{BTreeMap, BTreeSet};

/// A value of the right kind for the key.
#[derive(Clone, Debug)]
pub(super) enum Checked {
    Int(u64),
    Number(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Json(serde_json::Map<String, serde_json::Value>),
    Strings(BTreeMap<String, String>),
    Layers(Option<LayerSet>),
    Experts(IndexSet),
    Pair([f64; 2]),
    Recompute(Recompute),
    Tokens(Vec<Token>),
    /// `"auto"`, for a numeric key.
    Auto,
    Table(Section),
    Tables(Vec<Section>),
}

/// A table of checked values. Keys with neither a valid value nor a default are missing.
#[derive(Clone, Debug, Default)]
pub(super) struct Section {
    pub values: BTreeMap<&'static str, Checked>,
    /// Position of the table; `None` if absent from the recipe.
    pub at: Option<At>,
}

impl Section {
    /// The table under `key`.
    pub fn table(&self, key: &str) -> Option<&Section> {
        match self.values.get(key) {
            Some(Checked::Table(s)) => Some(s),
            _ => None,
        }
    }

    /// The list of tables under `key`; empty if absent.
    pub fn tables(&self, key: &str) -> &[Section] {
        match self.values.get(key) {
            Some(Checked::Tables(s)) => s,
            _ => &[],
        }
    }

    /// Position of the table in `texts`; the file without a line if absent.
    pub fn place(&self, texts: &[Text]) -> Place {
        match &self.at {
            Some(at) => Diagnostic::new(texts, at, "").place,
            None => {
                Place { file: texts.first().map_or(String::new(), |t| t.name.clone()), line: 0, column: 0 }
            }
        }
    }
}

/// Collects the problems of one recipe.
pub(super) struct Checker<'t> {
    pub texts: &'t [Text],
    pub problems: Vec<Diagnostic>,
    /// Paths with a problem. Checks across keys skip them.
    pub bad: BTreeSet<String>,
}

impl Checker<'_> {
    /// Adds a problem with the key at `path`.
    pub fn report(&mut self, at: &At, path: &str, message: impl Into<String>, hints: &[String]) {
        if self.problems.len() >= MOST {
            return;
        }
        let d = Diagnostic::new(self.texts, at, message).key(path);
        self.problems.push(hints.iter().fold(d, |d, h| d.hint(h)));
        self.bad.insert(path.to_string());
    }

    /// Checks the whole recipe.
    pub fn root(&mut self, root: &Table) -> Section {
        self.table(root, Recipe::KEYS, "", &At { text: 0, span: 0..0 })
    }

    fn table(&mut self, table: &Table, keys: &'static [Key], path: &str, at: &At) -> Section {
        let mut meant = Vec::new();
        for e in &table.0 {
            if self.problems.len() < MOST && !keys.iter().any(|k| k.name == e.key) {
                let (message, hints) = names::unknown(path, &e.key, keys);
                meant.extend(names::meant(path, &e.key, keys));
                self.report(&e.key_at, &join(path, &e.key), message, &hints);
            }
        }
        let mut section = Section { values: BTreeMap::new(), at: Some(at.clone()) };
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

    /// The value for a key that is absent, or (`wrong`) invalid and already reported.
    fn absent(&mut self, key: &'static Key, path: &str, at: &At, wrong: bool) -> Option<Checked> {
        match (key.default, key.kind) {
            (Unset::Required, Kind::Table(keys)) => Some(Checked::Table(if wrong {
                Section::default()
            } else {
                // Report the required keys inside the missing table.
                let mut section = self.table(&Table::default(), keys, path, at);
                section.at = None;
                section
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
                let node = default_node(text)?;
                // Defaults are valid, as a test confirms.
                let mut quiet = Checker { texts: self.texts, problems: Vec::new(), bad: BTreeSet::new() };
                let mut checked = quiet.node(&node, key, path);
                if let Some(Checked::Table(section)) = &mut checked {
                    section.at = None;
                }
                checked
            }
        }
    }

    fn node(&mut self, node: &Node, key: &'static Key, path: &str) -> Option<Checked> {
        let checked = match (key.kind, &node.value) {
            (Kind::Table(keys), Value::Table(t)) => {
                return Some(Checked::Table(self.table(t, keys, path, &node.at)));
            }
            (Kind::Tables(keys), Value::List(list)) => return self.tables(list, keys, path),
            (Kind::Words(words), Value::List(list)) => return self.words(list, words, path),
            (Kind::Modules, Value::List(list)) => return self.modules(list, node, path),
            (Kind::Devices, Value::List(list)) => return self.devices(list, path),
            (kind, value) => self.single(kind, value, path),
        };
        match checked {
            Ok(v) => Some(v),
            Err(Wrong { message, hints }) => {
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
            if self.problems.len() >= MOST {
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

    fn words(&mut self, list: &[Node], words: &[(&str, &str)], path: &str) -> Option<Checked> {
        let mut good = Vec::new();
        for (i, node) in list.iter().enumerate() {
            let here = format!("{path}.{i}");
            let all = || words.iter().map(|(w, _)| *w).collect::<Vec<_>>();
            match &node.value {
                Value::Text(w) if good.contains(w) => {
                    self.report(&node.at, &here, format!("{path} has {} twice", quote(w)), &[]);
                }
                Value::Text(w) if all().contains(&w.as_str()) => good.push(w.clone()),
                Value::Text(w) => {
                    let message = format!("{path} has no {}", quote(w));
                    self.report(&node.at, &here, message, &names::words_hint(path, w, &all()));
                }
                other => {
                    let message = format!("{here} takes a string, not {}", found(other));
                    self.report(&node.at, &here, message, &names::words_hint(path, "", &all()));
                }
            }
        }
        Some(Checked::Texts(good))
    }

    fn devices(&mut self, list: &[Node], path: &str) -> Option<Checked> {
        let mut good = Vec::new();
        for (i, node) in list.iter().enumerate() {
            let here = format!("{path}.{i}");
            let device = match &node.value {
                Value::Text(w) => OneDevice::from_word(w),
                _ => None,
            };
            match device.map(OneDevice::word) {
                Some(w) if good.contains(&w) => {
                    self.report(&node.at, &here, format!("{path} has {} twice", quote(&w)), &[]);
                }
                Some(w) => good.push(w),
                None => {
                    let message = format!("{path} has no {}", found(&node.value));
                    self.report(&node.at, &here, message, &[format!("{} is wanted", OneDevice::SPELT)]);
                }
            }
        }
        Some(Checked::Texts(good))
    }

    fn modules(&mut self, list: &[Node], whole: &Node, path: &str) -> Option<Checked> {
        let mut good = Vec::new();
        if list.is_empty() {
            self.report(&whole.at, path, format!("{path} is empty: the rule would match nothing"), &[]);
        }
        for (i, node) in list.iter().enumerate() {
            let here = format!("{path}.{i}");
            match &node.value {
                Value::Text(m) if good.contains(m) => {
                    self.report(&node.at, &here, format!("{path} has {} twice", quote(m)), &[]);
                }
                Value::Text(m) => match values::module(m) {
                    Ok(()) => good.push(m.clone()),
                    Err(values::Bad { message, hint }) => {
                        self.report(&node.at, &here, message, &[hint]);
                    }
                },
                other => {
                    let message = format!("{here} takes a string, not {}", found(other));
                    self.report(&node.at, &here, message, &[]);
                }
            }
        }
        Some(Checked::Texts(good))
    }

    /// Checks kinds with at most one problem per value.
    fn single(&mut self, kind: Kind, value: &Value, path: &str) -> Result<Checked, Wrong> {
        match (kind, value) {
            (Kind::Int(from, to) | Kind::IntOrAuto(from, to), Value::Int(i)) => {
                match u64::try_from(*i).ok().filter(|i| (from..=to).contains(i)) {
                    Some(i) => Ok(Checked::Int(i)),
                    None => Err(Wrong::plain()),
                }
            }
            (Kind::IntOrAuto(..), Value::Text(s)) if s == "auto" => Ok(Checked::Auto),
            (Kind::Number(bound), Value::Int(_) | Value::Float(_)) => match number(value) {
                Some(x) if bound.holds(x) => match in_single(path, x) {
                    Some(wrong) => Err(wrong),
                    None => Ok(Checked::Number(x)),
                },
                _ => Err(Wrong::plain()),
            },
            (Kind::Bool, Value::Bool(b)) => Ok(Checked::Bool(*b)),
            (Kind::Text, Value::Text(s)) if !s.trim().is_empty() && !s.contains('\0') => {
                Ok(Checked::Text(s.clone()))
            }
            (Kind::Name, Value::Text(s)) if values::is_name(s) => Ok(Checked::Text(s.clone())),
            (Kind::Word(words), Value::Text(s)) => match words.iter().any(|(w, _)| w == s) {
                true => Ok(Checked::Text(s.clone())),
                false => {
                    let all: Vec<&str> = words.iter().map(|(w, _)| *w).collect();
                    Err(Wrong {
                        message: Some(format!("{path} has no {}", quote(s))),
                        hints: names::words_hint(path, s, &all),
                    })
                }
            },
            (Kind::Anything, Value::Table(t)) => {
                values::json(t, path).map(Checked::Json).map_err(Wrong::from)
            }
            (Kind::Strings, Value::Table(t)) => {
                values::strings(t, path).map(Checked::Strings).map_err(Wrong::from)
            }
            (Kind::Tokens, Value::List(list)) => {
                values::tokens(list, path).map(Checked::Tokens).map_err(Wrong::from)
            }
            (Kind::Layers, v) => values::layers(v).map(Checked::Layers).map_err(Wrong::from),
            (Kind::Experts, v) => values::experts(v).map(Checked::Experts).map_err(Wrong::from),
            (Kind::Betas, Value::List(l)) => match l.iter().map(|n| number(&n.value)).collect::<Vec<_>>()[..]
            {
                [Some(a), Some(b)] if (0.0..1.0).contains(&a) && (0.0..1.0).contains(&b) => {
                    match in_single(path, a).or_else(|| in_single(path, b)) {
                        Some(wrong) => Err(wrong),
                        None => Ok(Checked::Pair([a, b])),
                    }
                }
                _ => Err(Wrong::plain()),
            },
            (Kind::Bytes, v) => values::bytes(v, path).map(Checked::Int).map_err(Wrong::from),
            (Kind::Recompute, Value::Text(s)) => match Recompute::WORDS.iter().find(|(word, _)| word == s) {
                Some((_, r)) => Ok(Checked::Recompute(*r)),
                None => Err(Wrong {
                    message: Some(format!("{path} has no {}", quote(s))),
                    hints: names::words_hint(path, s, &Recompute::WORDS.map(|(word, _)| word)),
                }),
            },
            (Kind::Recompute, Value::Int(i)) => match usize::try_from(*i) {
                Ok(n) if n as u64 <= INDEX => Ok(Checked::Recompute(Recompute::Layers(n))),
                _ => Err(Wrong::plain()),
            },
            (Kind::Tables(_), Value::Table(_)) => Err(Wrong {
                message: None,
                hints: vec![format!("a list of tables has two brackets: [[{path}]]")],
            }),
            (Kind::Modules | Kind::Tokens | Kind::Words(_) | Kind::Devices, Value::Text(s)) => {
                Err(Wrong { message: None, hints: vec![format!("write [{}]", quote(s))] })
            }
            (Kind::Int(..) | Kind::IntOrAuto(..) | Kind::Number(_) | Kind::Bool, Value::Text(s)) => {
                let bare = default_node(s).is_some_and(|n| !matches!(n.value, Value::Text(_)));
                let hints = if bare { vec![format!("without quotes: {s}")] } else { Vec::new() };
                Err(Wrong { message: None, hints })
            }
            _ => Err(Wrong::plain()),
        }
    }
}

/// Reason for rejecting a value.
struct Wrong {
    /// `None` for the generic message: expected kind, and value found.
    message: Option<String>,
    hints: Vec<String>,
}

impl Wrong {
    fn plain() -> Self {
        Self { message: None, hints: Vec::new() }
    }
}

impl From<values::Bad> for Wrong {
    fn from(bad: values::Bad) -> Self {
        Self { message: Some(bad.message), hints: vec![bad.hint] }
    }
}

/// Keys used in f64 arithmetic; all remaining numbers are converted to f32.
const DOUBLE: [&str; 3] = ["epochs", "warmup_ratio", "weight"];

/// Rejects a number that conversion to f32 turns into 0, 1 or infinity.
fn in_single(path: &str, x: f64) -> Option<Wrong> {
    let single = x as f32;
    let other = if single == 0.0 && x != 0.0 {
        "0"
    } else if single == 1.0 && x < 1.0 {
        "1"
    } else if single.is_infinite() {
        "infinite"
    } else {
        return None;
    };
    if path.rsplit('.').next().is_some_and(|key| DOUBLE.contains(&key)) {
        return None;
    }
    let message = format!("{path}: {x:?} is {other} in f32, which it is computed in");
    let hint = match other {
        "0" => "f32 holds numbers from 1e-45 on; the usual ones are far above",
        "1" => "the largest below 1 in f32 is 0.99999994",
        _ => "f32 holds numbers up to 3.4e38",
    };
    Some(Wrong { message: Some(message), hints: vec![hint.into()] })
}

/// The value of an integer or float.
pub(super) fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Int(i) => Some(*i as f64),
        Value::Float(x) => Some(*x),
        _ => None,
    }
}

/// Parses `text` as a TOML value.
pub(super) fn default_node(text: &str) -> Option<Node> {
    let texts = [Text::file(String::new(), format!("v={text}"))];
    let (table, problems) = super::tree::read(&texts);
    if problems.is_empty() && table.0.len() == 1 { table.0.into_iter().next().map(|e| e.node) } else { None }
}

/// Describes the values accepted by `kind`.
pub(super) fn expected(kind: Kind) -> String {
    let list = |words: &[(&str, &str)]| words.iter().map(|(w, _)| quote(w)).collect::<Vec<_>>().join(", ");
    match kind {
        Kind::Int(from, to) if from == to => format!("{from}"),
        Kind::Int(from, to) => format!("a whole number from {from} to {to}"),
        Kind::IntOrAuto(from, to) => format!("a whole number from {from} to {to}, or \"auto\""),
        Kind::Number(bound) => bound.words().to_string(),
        Kind::Bool => "true or false".into(),
        Kind::Text => "a string that is not empty".into(),
        Kind::Name => "a string that can name a folder (no slash, not \"..\")".into(),
        Kind::Word(words) => format!("one of {}", list(words)),
        Kind::Words(words) => format!("a list of {}", list(words)),
        Kind::Anything | Kind::Table(_) => "a table".into(),
        Kind::Strings => "a table of strings".into(),
        Kind::Modules => "a list of strings".into(),
        Kind::Tokens => "a list of strings and numbers".into(),
        Kind::Layers => "\"all\", a range such as \"0-5\", or a list of numbers".into(),
        Kind::Experts => "\"all\", a range such as \"0-3\", or a list of numbers".into(),
        Kind::Betas => "two numbers from 0 to below 1".into(),
        Kind::Bytes => "a size such as \"48GiB\"".into(),
        Kind::Recompute => {
            let words = Recompute::WORDS.map(|(word, _)| quote(word)).join(", ");
            format!("{words}, or a number of layers from 0 to {INDEX}")
        }
        Kind::Devices => format!("a list of {}", OneDevice::SPELT),
        Kind::Tables(_) => "a list of tables".into(),
    }
}

/// Describes a value found, abbreviated to 60 characters.
pub(super) fn found(value: &Value) -> String {
    let text = value.to_string();
    let text = if text.chars().count() > 60 {
        format!("{}...", text.chars().take(60).collect::<String>())
    } else {
        text
    };
    match value {
        Value::Int(i128::MIN | i128::MAX) => "a number of more than 38 digits".into(),
        Value::Text(s) if s.trim().is_empty() => "an empty string".into(),
        Value::Text(_) => format!("the string {text}"),
        Value::Int(_) | Value::Float(_) | Value::Bool(_) => text,
        Value::Date(_) => format!("the date {text}"),
        Value::List(_) => format!("the list {text}"),
        Value::Table(_) => "a table".into(),
    }
}
