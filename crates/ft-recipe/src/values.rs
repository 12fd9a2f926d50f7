//! Parsers for values with a syntax of their own: layers, experts, modules, sizes, free tables.

use super::check::found;
use super::kind::{GROUPS, INDEX};
use super::tree::{Node, Table, Value, join, quote};
use super::types::{IndexSet, LayerSet, Token};
use regex::{Regex, RegexBuilder};
use std::collections::BTreeMap;

/// Rejection of a value: message and hint.
#[derive(Debug)]
pub(super) struct Bad {
    pub message: String,
    pub hint: String,
}

fn bad(message: impl Into<String>, hint: impl Into<String>) -> Bad {
    Bad { message: message.into(), hint: hint.into() }
}

const LAYERS: &str = "\"all\", \"3\", \"0-5\", \"24-\", \"-6:\" (the last six) or [0, 3, 5]";
const EXPERTS: &str = "\"all\", \"3\", \"0-3\", \"4-\" or [0, 7]";

/// Parses `train.layers`; `None` means all layers.
pub(super) fn layers(value: &Value) -> Result<Option<LayerSet>, Bad> {
    if let Value::Text(s) = value {
        if s == "all" {
            return Ok(None);
        }
        if let Some(count) = s.strip_prefix('-').and_then(|s| s.strip_suffix(':')) {
            return match index(count) {
                Some(n) if n > 0 => Ok(Some(LayerSet::Last(n))),
                _ => Err(bad(format!("layers {} are none", quote(s)), format!("layers takes {LAYERS}"))),
            };
        }
    }
    indices(value, "layers", LAYERS).map(|set| Some(LayerSet::Indices(set)))
}

/// Parses `train.experts`; "all" becomes an open range.
pub(super) fn experts(value: &Value) -> Result<IndexSet, Bad> {
    match value {
        Value::Text(s) if s == "all" => Ok(IndexSet::Range(0, None)),
        _ => indices(value, "experts", EXPERTS),
    }
}

fn indices(value: &Value, what: &str, takes: &str) -> Result<IndexSet, Bad> {
    let hint = || format!("{what} takes {takes}");
    match value {
        Value::Text(s) => match range(s) {
            Some((a, Some(b))) if b < a => {
                Err(bad(format!("{what} {} run backwards", quote(s)), format!("write \"{b}-{a}\"")))
            }
            Some((a, b)) => Ok(IndexSet::Range(a, b)),
            None => Err(bad(format!("{what} cannot be {}", quote(s)), hint())),
        },
        Value::Int(_) => match single(value) {
            Some(i) => Ok(IndexSet::List(vec![i])),
            None => Err(bad(format!("{what} cannot be {}", found(value)), hint())),
        },
        Value::List(list) if list.is_empty() => {
            Err(bad(format!("{what} is an empty list: the rule would match nothing"), hint()))
        }
        Value::List(list) => {
            let mut set = Vec::with_capacity(list.len());
            for Node { value, .. } in list {
                match single(value) {
                    Some(i) if set.contains(&i) => {
                        return Err(bad(format!("{what} has {i} twice"), "write it once"));
                    }
                    Some(i) => set.push(i),
                    None => {
                        let message = format!("{what} has {}, which is not an index", found(value));
                        return Err(bad(message, format!("an index is a whole number from 0 to {INDEX}")));
                    }
                }
            }
            Ok(IndexSet::List(set))
        }
        _ => Err(bad(format!("{what} cannot be {}", found(value)), hint())),
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
pub(super) fn tokens(list: &[Node], path: &str) -> Result<Vec<Token>, Bad> {
    let mut out = Vec::new();
    for node in list {
        let token = match &node.value {
            Value::Text(text) if !text.is_empty() => Some(Token::Text(text.clone())),
            Value::Int(id) => u32::try_from(*id).ok().map(Token::Id),
            _ => None,
        };
        let Some(token) = token else {
            let what = found(&node.value);
            return Err(bad(
                format!("{path} has {what}"),
                "a token is its text, as the tokenizer spells it, or its number",
            ));
        };
        if out.contains(&token) {
            return Err(bad(format!("{path} has {token} twice"), "each row trains once"));
        }
        out.push(token);
    }
    match out.is_empty() {
        true => Err(bad(format!("{path} is empty"), "name the tokens whose rows train")),
        false => Ok(out),
    }
}

/// Validates one entry of `train.modules`.
pub(super) fn module(entry: &str) -> Result<(), Bad> {
    let groups = || {
        let names: Vec<&str> = GROUPS.iter().map(|(g, _)| *g).collect();
        format!("groups are {}; or the last part of a module's name; or \"/regex/\"", names.join(", "))
    };
    match module_regex(entry) {
        Some(Ok(_)) if entry.len() > 2 => Ok(()),
        Some(Ok(_)) => Err(bad("an empty regular expression matches no module", groups())),
        Some(Err(e)) => {
            let why = e.to_string();
            let last = why.lines().last().unwrap_or("").trim_start_matches("error: ").to_string();
            Err(bad(
                format!("{} is not a regular expression: {last}", quote(entry)),
                "the syntax is that of the crate regex, version 1",
            ))
        }
        None if entry.starts_with('/') => {
            Err(bad(format!("{} has no closing slash", quote(entry)), format!("write \"{entry}/\"")))
        }
        None if entry.contains(['.', '*']) => Err(bad(
            format!("{} is neither a group nor the last part of a module's name", quote(entry)),
            format!("for whole names write \"/{}/\"", entry.replace('.', "[.]").replace('*', ".*")),
        )),
        None if !entry.is_empty() && entry.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') => Ok(()),
        None => Err(bad(format!("{} cannot name a module", quote(entry)), groups())),
    }
}

/// Whether `text` can be the name of a folder.
pub(super) fn is_name(text: &str) -> bool {
    !text.trim().is_empty()
        && text.len() <= 200
        && text != "."
        && text != ".."
        && !text.contains(['/', '\\', '{', '}'])
        && !text.chars().any(char::is_control)
}

/// Size units, largest first, with factors.
const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("kB", 1_000),
    ("B", 1),
];

/// Smallest size accepted without a unit. A smaller number was probably meant in another unit.
pub(super) const BARE: u64 = 1 << 20;

/// Parses a size: `"48GiB"`, `"500 MB"`, or a plain number of bytes from 1 MiB on.
pub(super) fn bytes(value: &Value, path: &str) -> Result<u64, Bad> {
    let wrong = || {
        bad(
            format!("{path} cannot be {}", found(value)),
            "a size has a number and a unit: \"48GiB\", \"500MiB\", \"80GB\"; or it is a number of bytes",
        )
    };
    let bare = |bytes: u64| match bytes {
        1..BARE => Err(bad(
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
                "KB" => (amount * 1e3) as u64,
                unit => {
                    let (_, factor) = UNITS.iter().find(|(u, _)| *u == unit).ok_or_else(wrong)?;
                    (amount * *factor as f64) as u64
                }
            }
        }
        _ => return Err(wrong()),
    };
    if (1..=1 << 60).contains(&bytes) { Ok(bytes) } else { Err(wrong()) }
}

/// Formats a size in the largest binary unit that divides it.
pub(super) fn written_bytes(bytes: u64) -> String {
    let binary = UNITS.iter().filter(|(unit, _)| unit.contains('i') || *unit == "B");
    match binary.into_iter().find(|(_, size)| bytes.is_multiple_of(*size)) {
        Some((unit, size)) => quote(&format!("{}{unit}", bytes / size)),
        None => bytes.to_string(),
    }
}

/// Converts a table to JSON. Rejects values unknown to JSON: dates, nan, inf.
pub(super) fn json(table: &Table, path: &str) -> Result<serde_json::Map<String, serde_json::Value>, Bad> {
    let mut map = serde_json::Map::new();
    for e in &table.0 {
        map.insert(e.key.clone(), json_value(&e.node.value, &join(path, &e.key))?);
    }
    Ok(map)
}

fn json_value(value: &Value, path: &str) -> Result<serde_json::Value, Bad> {
    let wrong = || {
        bad(format!("{path} cannot be {}: JSON has no such value", found(value)), "this table becomes JSON")
    };
    Ok(match value {
        Value::Text(s) => s.clone().into(),
        Value::Int(i) => i64::try_from(*i).map_err(|_| wrong())?.into(),
        Value::Float(x) => serde_json::Number::from_f64(*x).ok_or_else(wrong)?.into(),
        Value::Bool(b) => (*b).into(),
        Value::Date(_) => return Err(wrong()),
        Value::List(l) => {
            let list: Result<Vec<_>, Bad> = l.iter().map(|n| json_value(&n.value, path)).collect();
            list?.into()
        }
        Value::Table(t) => {
            let mut map = serde_json::Map::new();
            for e in &t.0 {
                map.insert(e.key.clone(), json_value(&e.node.value, &join(path, &e.key))?);
            }
            map.into()
        }
    })
}

/// Converts a table of non-empty strings.
pub(super) fn strings(table: &Table, path: &str) -> Result<BTreeMap<String, String>, Bad> {
    let mut map = BTreeMap::new();
    for e in &table.0 {
        match &e.node.value {
            Value::Text(s) if !s.is_empty() => map.insert(e.key.clone(), s.clone()),
            other => {
                let message =
                    format!("{path}.{} takes a string that is not empty, not {}", e.key, found(other));
                return Err(bad(message, "the file's name of the field stands on the right"));
            }
        };
    }
    Ok(map)
}

/// Converts a default to JSON for the schema. Values unknown to JSON become null.
pub(super) fn plain_json(value: &Value) -> serde_json::Value {
    json_value(value, "").unwrap_or_default()
}
