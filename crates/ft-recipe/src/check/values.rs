//! Parsers for values with a syntax of their own: layers, experts, modules, sizes, free tables.

use super::describe::found;
use crate::keys::{GROUPS, INDEX, IndexSet, Json, LayerSet, SMALLEST_BARE, Token, UNITS};
use crate::syntax::{Entry, Node, Table, Value, join, quote};
use regex::{Regex, RegexBuilder};
use std::collections::BTreeMap;

/// Reason for rejecting a value.
#[derive(Debug, Default)]
pub(crate) struct Rejection {
    /// `None` for the generic message: expected kind, and value found.
    pub message: Option<String>,
    pub hints: Vec<String>,
}

pub(super) fn rejection(message: impl Into<String>, hint: impl Into<String>) -> Rejection {
    Rejection { message: Some(message.into()), hints: vec![hint.into()] }
}

const LAYERS: &str = "\"all\", \"3\", \"0-5\", \"24-\", \"-6:\" (the last six) or [0, 3, 5]";
const EXPERTS: &str = "\"all\", \"3\", \"0-3\", \"4-\" or [0, 7]";

/// Parses `train.layers`; `None` means all layers.
pub(crate) fn layers(value: &Value) -> Result<Option<LayerSet>, Rejection> {
    if let Value::Text(s) = value {
        if s == "all" {
            return Ok(None);
        }
        if let Some(count) = s.strip_prefix('-').and_then(|s| s.strip_suffix(':')) {
            return match index(count) {
                Some(n) if n > 0 => Ok(Some(LayerSet::Last(n))),
                _ => {
                    Err(rejection(format!("layers {} are none", quote(s)), format!("layers takes {LAYERS}")))
                }
            };
        }
    }
    indices(value, "layers", LAYERS).map(|set| Some(LayerSet::Indices(set)))
}

/// Parses `train.experts`; "all" becomes an open range.
pub(crate) fn experts(value: &Value) -> Result<IndexSet, Rejection> {
    match value {
        Value::Text(s) if s == "all" => Ok(IndexSet::Range(0, None)),
        _ => indices(value, "experts", EXPERTS),
    }
}

/// Parses a list of counts from 1.
pub(super) fn counts(list: &[Node]) -> Result<Vec<usize>, Rejection> {
    let count = |n: &Node| single(&n.value).filter(|n| *n > 0).ok_or_else(Rejection::default);
    list.iter().map(count).collect()
}

fn indices(value: &Value, what: &str, takes: &str) -> Result<IndexSet, Rejection> {
    let hint = || format!("{what} takes {takes}");
    match value {
        Value::Text(s) => match range(s) {
            Some((a, Some(b))) if b < a => {
                Err(rejection(format!("{what} {} run backwards", quote(s)), format!("write \"{b}-{a}\"")))
            }
            Some((a, b)) => Ok(IndexSet::Range(a, b)),
            None => Err(rejection(format!("{what} cannot be {}", quote(s)), hint())),
        },
        Value::Int(_) if single(value).is_some() => Ok(IndexSet::List(single(value).into_iter().collect())),
        Value::List(list) if list.is_empty() => {
            Err(rejection(format!("{what} is an empty list: the rule would match nothing"), hint()))
        }
        Value::List(list) => {
            let mut set = Vec::with_capacity(list.len());
            for Node { value, .. } in list {
                match single(value) {
                    Some(i) if set.contains(&i) => {
                        return Err(rejection(format!("{what} has {i} twice"), "write it once"));
                    }
                    Some(i) => set.push(i),
                    None => {
                        let message = format!("{what} has {}, which is not an index", found(value));
                        return Err(rejection(
                            message,
                            format!("an index is a whole number from 0 to {INDEX}"),
                        ));
                    }
                }
            }
            Ok(IndexSet::List(set))
        }
        _ => Err(rejection(format!("{what} cannot be {}", found(value)), hint())),
    }
}

/// Parses `3`, `0-5` (inclusive) or `24-`.
fn range(text: &str) -> Option<(usize, Option<usize>)> {
    match text.split_once('-') {
        None => index(text).map(|i| (i, Some(i))),
        Some((a, "")) => index(a).map(|a| (a, None)),
        Some((a, b)) => Some((index(a)?, Some(index(b)?))),
    }
}

fn index(text: &str) -> Option<usize> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    text.parse::<usize>().ok().filter(|i| digits && *i as u64 <= INDEX)
}

fn single(value: &Value) -> Option<usize> {
    match value {
        Value::Int(i) => usize::try_from(*i).ok().filter(|i| *i as u64 <= INDEX),
        _ => None,
    }
}

/// Compiles a `train.modules` entry of the form `/regex/`, anchored to match whole names.
///
/// Returns `None` for a group or a module name.
pub fn module_regex(entry: &str) -> Option<Result<Regex, regex::Error>> {
    let inner = entry.strip_prefix('/')?.strip_suffix('/')?;
    // Without a size limit, "(a{1000}){1000}" would exhaust memory.
    let build = |pattern: &str| RegexBuilder::new(pattern).size_limit(1 << 20).build();
    // Compiled alone first: "a)|(b" would escape the anchored group.
    Some(build(inner).and_then(|_| build(&format!("^(?:{inner})$"))))
}

/// Parses `train.tokens`: distinct texts and ids.
pub(crate) fn tokens(list: &[Node], path: &str) -> Result<Vec<Token>, Rejection> {
    let mut out = Vec::new();
    for node in list {
        let token = match &node.value {
            Value::Text(text) if !text.is_empty() => Some(Token::Text(text.clone())),
            Value::Int(id) => u32::try_from(*id).ok().map(Token::Id),
            _ => None,
        };
        let Some(token) = token else {
            let what = found(&node.value);
            return Err(rejection(
                format!("{path} has {what}"),
                "a token is its text, as the tokenizer spells it, or its number",
            ));
        };
        if out.contains(&token) {
            return Err(rejection(format!("{path} has {token} twice"), "each row trains once"));
        }
        out.push(token);
    }
    if out.is_empty() {
        return Err(rejection(format!("{path} is empty"), "name the tokens whose rows train"));
    }
    Ok(out)
}

/// Validates one entry of `train.modules`.
pub(crate) fn module(entry: &str) -> Result<(), Rejection> {
    let groups = || {
        let names: Vec<&str> = GROUPS.iter().map(|(g, _)| *g).collect();
        format!("groups are {}; or the last part of a module's name; or \"/regex/\"", names.join(", "))
    };
    match module_regex(entry) {
        Some(Ok(_)) if entry.len() > 2 => Ok(()),
        Some(Ok(_)) => Err(rejection("an empty regular expression matches no module", groups())),
        Some(Err(e)) => {
            let why = e.to_string();
            let last = why.lines().last().unwrap_or("").trim_start_matches("error: ").to_string();
            Err(rejection(
                format!("{} is not a regular expression: {last}", quote(entry)),
                "the syntax is that of the crate regex, version 1",
            ))
        }
        None if entry.starts_with('/') => {
            Err(rejection(format!("{} has no closing slash", quote(entry)), format!("write \"{entry}/\"")))
        }
        None if entry.contains(['.', '*']) => Err(rejection(
            format!("{} is neither a group nor the last part of a module's name", quote(entry)),
            format!("for whole names write \"/{}/\"", entry.replace('.', "[.]").replace('*', ".*")),
        )),
        None if !entry.is_empty() && entry.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') => Ok(()),
        None => Err(rejection(format!("{} cannot name a module", quote(entry)), groups())),
    }
}

/// Whether `text` can be the name of a folder.
pub(crate) fn is_name(text: &str) -> bool {
    !text.trim().is_empty()
        && text.len() <= 200
        && text != "."
        && text != ".."
        && !text.contains(['/', '\\', '{', '}'])
        && !text.chars().any(char::is_control)
}

/// Parses a size: `"48GiB"`, `"500 MB"`, `"48G"` (decimal, as cards are sold), or bytes from 1 MiB on.
pub(crate) fn bytes(value: &Value, path: &str) -> Result<u64, Rejection> {
    let wrong = || {
        rejection(
            format!("{path} cannot be {}", found(value)),
            "a size has a number and a unit: \"48GiB\", \"500MiB\", \"80GB\"; or it is a number of bytes",
        )
    };
    let bare = |bytes: u64| match bytes {
        1..SMALLEST_BARE => Err(rejection(
            format!("{path} = {value} has no unit, and {bytes} bytes are not what is meant"),
            format!("write \"{bytes}GiB\" or \"{bytes}MiB\"; \"{bytes}B\" are bytes"),
        )),
        _ => Ok(bytes),
    };
    let bytes = match value {
        Value::Int(i) => bare(u64::try_from(*i).map_err(|_| wrong())?)?,
        Value::Text(s) => {
            let s = s.trim();
            let digits = s.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(s.len());
            let (amount, unit) = s.split_at(digits);
            let amount = amount.parse::<f64>().map_err(|_| wrong())?;
            match unit.trim() {
                "" => bare(amount as u64)?,
                "K" | "KB" => (amount * 1e3) as u64,
                unit => {
                    let is =
                        |name: &str| name == unit || unit.len() == 1 && name.strip_suffix('B') == Some(unit);
                    let (_, factor) = UNITS.iter().find(|(name, _)| is(name)).ok_or_else(wrong)?;
                    (amount * *factor as f64) as u64
                }
            }
        }
        _ => return Err(wrong()),
    };
    if (1..=1 << 60).contains(&bytes) { Ok(bytes) } else { Err(wrong()) }
}

/// Converts a table to JSON. Rejects values unknown to JSON: dates, nan, inf.
pub(crate) fn json(table: &Table, path: &str) -> Result<Json, Rejection> {
    let entry = |e: &Entry| json_value(&e.node.value, &join(path, &e.key)).map(|v| (e.key.clone(), v));
    table.0.iter().map(entry).collect()
}

fn json_value(value: &Value, path: &str) -> Result<serde_json::Value, Rejection> {
    let wrong = || {
        rejection(
            format!("{path} cannot be {}: JSON has no such value", found(value)),
            "this table becomes JSON",
        )
    };
    Ok(match value {
        Value::Text(s) => s.clone().into(),
        Value::Int(i) => i64::try_from(*i).map_err(|_| wrong())?.into(),
        Value::Float(x) => serde_json::Number::from_f64(*x).ok_or_else(wrong)?.into(),
        Value::Bool(b) => (*b).into(),
        Value::Date(_) => return Err(wrong()),
        Value::List(l) => l.iter().map(|n| json_value(&n.value, path)).collect::<Result<Vec<_>, _>>()?.into(),
        Value::Table(t) => json(t, path)?.into(),
    })
}

/// Converts a table of non-empty strings.
pub(crate) fn strings(table: &Table, path: &str) -> Result<BTreeMap<String, String>, Rejection> {
    let entry = |e: &Entry| match &e.node.value {
        Value::Text(s) if !s.is_empty() => Ok((e.key.clone(), s.clone())),
        other => {
            let message = format!("{path}.{} takes a string that is not empty, not {}", e.key, found(other));
            Err(rejection(message, "the file's name of the field stands on the right"))
        }
    };
    table.0.iter().map(entry).collect()
}

/// Converts a default to JSON for the schema. Values unknown to JSON become null.
pub(crate) fn plain_json(value: &Value) -> serde_json::Value {
    json_value(value, "").unwrap_or_default()
}
