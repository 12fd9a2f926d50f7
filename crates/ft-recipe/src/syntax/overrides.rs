//! `KEY=VALUE` overrides from the command line.

use super::diagnostic::{Diagnostic, SourceText, Span};
use super::tree::{Entry, Node, Table, Value, convert};
use std::collections::BTreeMap;
use toml::de::DeTable;

/// Mutually exclusive keys (section, key, other): setting `key` on the command line removes `other`.
const EXCLUSIVE: &[(&str, &str, &str)] = &[
    ("run", "epochs", "steps"),
    ("run", "steps", "epochs"),
    ("optimizer", "warmup_steps", "warmup_ratio"),
    ("optimizer", "warmup_ratio", "warmup_steps"),
];

/// A value by path and spelling.
pub(crate) type Meant = fn(&str, &str, Node) -> Node;

/// Applies the overrides (`texts[1..]`) to `root`; `meant` changes values by the kind of their key.
pub(crate) fn apply_overrides(root: &mut Table, texts: &[SourceText], meant: Meant) -> Vec<Diagnostic> {
    let mut problems = Vec::new();
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    let keys: Vec<&str> =
        texts.iter().skip(1).map(|t| t.text.split_once('=').map_or("", |(k, _)| k.trim())).collect();
    for (section, key, other) in EXCLUSIVE {
        let names = |k: &str| keys.contains(&format!("{section}.{k}").as_str());
        if names(key) && !names(other) {
            remove(root, section, other);
        }
    }
    for (i, text) in texts.iter().enumerate().skip(1) {
        match parse_override(texts, i, meant) {
            Ok((path, path_at, node)) => {
                let word = text.text.split_once('=').map_or("", |(_, v)| v.trim());
                let node = meant(path, word, node);
                if let Some(first) = seen.insert(path, i) {
                    let message = format!("{path} is given twice on the command line");
                    problems.push(
                        Diagnostic::new(texts, &path_at, message)
                            .key(path)
                            .hint(format!("the other one is {}", texts[first].text)),
                    );
                } else if let Err(message) = put(root, path, &path_at, node) {
                    problems.push(Diagnostic::new(texts, &path_at, message).key(path));
                }
            }
            Err(d) => problems
                .push((*d).hint(format!("KEY=VALUE expected, such as run.seed=7; got {:?}", text.text))),
        }
    }
    problems
}

/// Parses override `i - 1` into path, position of the path, and value.
fn parse_override(
    texts: &[SourceText],
    i: usize,
    meant: Meant,
) -> Result<(&str, Span, Node), Box<Diagnostic>> {
    let wrong = |at: &Span, message: String| Box::new(Diagnostic::new(texts, at, message));
    let text = texts[i].text.as_str();
    let whole = Span { text: i, bytes: 0..text.len() };
    let Some((key, value)) = text.split_once('=') else {
        return Err(wrong(&whole, "an argument without \"=\"".into()));
    };
    let path = key.trim();
    let path_at = Span { text: i, bytes: 0..key.len() };
    let bare =
        |part: &str| !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-');
    if !path.split('.').all(bare) {
        return Err(wrong(&path_at, format!("{path:?} is not a dotted key")));
    }
    let word = value.trim();
    let value_at = Span { text: i, bytes: key.len() + 1..text.len() };
    if word.is_empty() {
        return Err(wrong(&whole, format!("{path} has no value; an empty string is {path}='\"\"'")));
    }
    // Offset between `v=` and the key with `=`.
    let (document, shift) = (format!("v={value}"), key.len().saturating_sub(1));
    let (table, errors) = DeTable::parse_recoverable(&document);
    let one = table.get_ref().len() == 1;
    if let (true, true, Some((_, v))) = (errors.is_empty(), one, table.get_ref().iter().next()) {
        return Ok((path, path_at, convert(v.get_ref(), value_at, i, shift)));
    }
    let is_text = || {
        // for a text key, a truth value is meant as text
        let node = Node { value: Value::Bool(true), at: value_at.clone() };
        matches!(meant(path, word, node).value, Value::Text(_))
    };
    // a slice of rows, `[-50:]`, is no list
    let list = word.starts_with('[') && !is_text();
    if list || word.starts_with(['"', '\'', '{']) || word.contains('\n') {
        let why = errors.first().map_or("more than one value", |e| e.message());
        return Err(wrong(&value_at, format!("the value of {path} is not TOML: {why}")));
    }
    Ok((path, path_at, Node { value: Value::Text(word.to_string()), at: value_at }))
}

/// Sets `path` in `root`, creating tables as necessary.
fn put(root: &mut Table, path: &str, at: &Span, node: Node) -> Result<(), String> {
    let parts: Vec<&str> = path.split('.').collect();
    let mut place = entry(root, &parts, 0, at)?;
    for (depth, part) in parts.iter().enumerate().skip(1) {
        let above = parts[..depth].join(".");
        place = match &mut place.value {
            Value::Table(t) => entry(t, &parts, depth, at)?,
            Value::List(list) => {
                let missing = match list.len() {
                    0 => format!("{above} is empty: it has no {part}"),
                    1 => format!("{above} has 1 entry, counted from 0: there is no {part}"),
                    n => format!("{above} has {n} entries, counted from 0: there is no {part}"),
                };
                part.parse::<usize>().ok().and_then(|i| list.get_mut(i)).ok_or(missing)?
            }
            _ => return Err(format!("{above} is a single value, nothing is inside it")),
        };
    }
    *place = node;
    Ok(())
}

/// The value of key `parts[depth]`. If absent or the last part, an empty table from `at`; an absent key before an index
/// is an error.
fn entry<'a>(table: &'a mut Table, parts: &[&str], depth: usize, at: &Span) -> Result<&'a mut Node, String> {
    let (key, next) = (parts[depth], parts.get(depth + 1));
    let empty = || Node { value: Value::Table(Table::default()), at: at.clone() };
    let i = match table.0.iter().position(|e| e.key == key) {
        Some(i) if next.is_some() => i,
        Some(i) => {
            (table.0[i].key_at, table.0[i].node) = (at.clone(), empty());
            i
        }
        None if next.is_some_and(|p| p.parse::<usize>().is_ok()) => {
            return Err(format!("the recipe has no {}", parts[..=depth].join(".")));
        }
        None => {
            table.0.push(Entry { key: key.to_string(), key_at: at.clone(), node: empty() });
            table.0.len() - 1
        }
    };
    Ok(&mut table.0[i].node)
}

/// Removes `section.key`, when the command line sets a conflicting key.
fn remove(root: &mut Table, section: &str, key: &str) {
    if let Some(Entry { node: Node { value: Value::Table(t), .. }, .. }) =
        root.0.iter_mut().find(|e| e.key == section)
    {
        t.0.retain(|e| e.key != key);
    }
}
