//! TOML as a tree with source positions, and `KEY=VALUE` overrides from the command line.

use super::report::{At, Diagnostic, MOST, Text};
use std::collections::BTreeMap;
use std::fmt;
use toml::de::{DeTable, DeValue};

/// A value with position.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub value: Value,
    pub at: At,
}

/// A TOML value.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Text(String),
    /// Wider than TOML's 64 bits, so that an out-of-range number can be reported.
    Int(i128),
    Float(f64),
    Bool(bool),
    Date(String),
    List(Vec<Node>),
    Table(Table),
}

/// Entries in file order.
#[derive(Clone, Debug, Default)]
pub(super) struct Table(pub Vec<Entry>);

/// One key of a table.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub key: String,
    pub key_at: At,
    pub node: Node,
}

impl Table {
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.0.iter().find(|e| e.key == key).map(|e| &e.node)
    }

    /// Inserts or replaces `key`.
    fn set(&mut self, key: &str, key_at: At, node: Node) {
        match self.0.iter_mut().find(|e| e.key == key) {
            Some(e) => (e.key_at, e.node) = (key_at, node),
            None => self.0.push(Entry { key: key.to_string(), key_at, node }),
        }
    }

    /// The node at a dotted path. A number indexes a list.
    pub fn find(&self, path: &str) -> Option<&Node> {
        let mut parts = path.split('.');
        let mut node = self.get(parts.next()?)?;
        for part in parts {
            node = match &node.value {
                Value::Table(t) => t.get(part)?,
                Value::List(l) => l.get(part.parse::<usize>().ok()?)?,
                _ => return None,
            };
        }
        Some(node)
    }

    /// Removes `section.key`, when the command line sets a conflicting key.
    fn remove(&mut self, section: &str, key: &str) {
        if let Some(Entry { node: Node { value: Value::Table(t), .. }, .. }) =
            self.0.iter_mut().find(|e| e.key == section)
        {
            t.0.retain(|e| e.key != key);
        }
    }

    /// Calls `f` with the dotted path and position of every node.
    pub fn walk(&self, prefix: &str, f: &mut dyn FnMut(String, &At)) {
        for e in &self.0 {
            visit(&e.node, join(prefix, &e.key), f);
        }
    }
}

fn visit(node: &Node, path: String, f: &mut dyn FnMut(String, &At)) {
    f(path.clone(), &node.at);
    match &node.value {
        Value::Table(t) => t.walk(&path, f),
        // Only free tables contain longer lists, and positions inside free tables are never used.
        Value::List(l) if l.len() <= 1000 => {
            l.iter().enumerate().for_each(|(i, n)| visit(n, join(&path, &i.to_string()), f))
        }
        _ => {}
    }
}

/// Joins with a dot, unless `prefix` is empty.
pub(super) fn join(prefix: &str, key: &str) -> String {
    if prefix.is_empty() { key.to_string() } else { format!("{prefix}.{key}") }
}

/// Parses `texts[0]` as TOML. Returns syntax errors as problems, along with the recoverable part of the tree.
pub(super) fn read(texts: &[Text]) -> (Table, Vec<Diagnostic>) {
    let (table, errors) = DeTable::parse_recoverable(&texts[0].text);
    // Further errors on a line are usually consequences of the first.
    let mut last = None;
    let problems = errors
        .iter()
        .take(MOST)
        .map(|e| {
            let at = At { text: 0, span: e.span().unwrap_or(0..0) };
            Diagnostic::new(texts, &at, format!("TOML: {}", e.message()))
        })
        .filter(|d| last.replace(d.place.line) != Some(d.place.line))
        .collect();
    (convert_table(table.get_ref(), 0, 0), problems)
}

/// Converts a table. `shift` maps spans of a value parsed as `v=VALUE` to positions in the override.
fn convert_table(table: &DeTable<'_>, text: usize, shift: usize) -> Table {
    Table(
        table
            .iter()
            .map(|(key, value)| Entry {
                key: key.get_ref().to_string(),
                key_at: at(text, key.span(), shift),
                node: convert(value.get_ref(), at(text, value.span(), shift), text, shift),
            })
            .collect(),
    )
}

fn at(text: usize, span: std::ops::Range<usize>, shift: usize) -> At {
    At { text, span: span.start + shift..span.end + shift }
}

fn convert(value: &DeValue<'_>, place: At, text: usize, shift: usize) -> Node {
    let value = match value {
        DeValue::String(s) => Value::Text(s.to_string()),
        DeValue::Integer(i) => Value::Int(i128::from_str_radix(i.as_str(), i.radix()).unwrap_or(
            // Beyond 128 bits, any out-of-range number serves.
            if i.as_str().starts_with('-') { i128::MIN } else { i128::MAX },
        )),
        DeValue::Float(f) => Value::Float(f.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(b) => Value::Bool(*b),
        DeValue::Datetime(d) => Value::Date(d.to_string()),
        DeValue::Array(a) => Value::List(
            a.iter().map(|v| convert(v.get_ref(), at(text, v.span(), shift), text, shift)).collect(),
        ),
        DeValue::Table(t) => Value::Table(convert_table(t, text, shift)),
    };
    Node { value, at: place }
}

/// Mutually exclusive keys (section, key, other): setting `key` on the command line removes `other`.
const INSTEAD: &[(&str, &str, &str)] = &[
    ("run", "epochs", "steps"),
    ("optimizer", "warmup_steps", "warmup_ratio"),
    ("optimizer", "warmup_ratio", "warmup_steps"),
];

/// Applies the overrides (`texts[1..]`) to `root`.
pub(super) fn apply_overrides(root: &mut Table, texts: &[Text]) -> Vec<Diagnostic> {
    let mut problems = Vec::new();
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    let keys: Vec<&str> =
        texts.iter().skip(1).map(|t| t.text.split_once('=').map_or("", |(k, _)| k.trim())).collect();
    for (section, key, other) in INSTEAD {
        let names = |k: &str| keys.contains(&format!("{section}.{k}").as_str());
        if names(key) && !names(other) {
            root.remove(section, other);
        }
    }
    for (i, text) in texts.iter().enumerate().skip(1) {
        match parse_override(texts, i) {
            Ok((path, path_at, node)) => {
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
fn parse_override(texts: &[Text], i: usize) -> Result<(&str, At, Node), Box<Diagnostic>> {
    let wrong = |at: &At, message: String| Box::new(Diagnostic::new(texts, at, message));
    let text = texts[i].text.as_str();
    let whole = At { text: i, span: 0..text.len() };
    let Some((key, value)) = text.split_once('=') else {
        return Err(wrong(&whole, "an argument without \"=\"".into()));
    };
    let path = key.trim();
    let path_at = At { text: i, span: 0..key.len() };
    let bare =
        |part: &str| !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-');
    if !path.split('.').all(bare) {
        return Err(wrong(&path_at, format!("{path:?} is not a dotted key")));
    }
    let word = value.trim();
    let value_at = At { text: i, span: key.len() + 1..text.len() };
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
    if word.starts_with(['"', '\'', '[', '{']) || word.contains('\n') {
        let why = errors.first().map_or("more than one value", |e| e.message());
        return Err(wrong(&value_at, format!("the value of {path} is not TOML: {why}")));
    }
    Ok((path, path_at, Node { value: Value::Text(word.to_string()), at: value_at }))
}

/// Sets `path` in `root`, creating tables as necessary.
fn put(root: &mut Table, path: &str, path_at: &At, node: Node) -> Result<(), String> {
    let parts: Vec<&str> = path.split('.').collect();
    put_in_table(root, &parts, 0, path_at, node)
}

fn put_in_table(table: &mut Table, parts: &[&str], depth: usize, at: &At, node: Node) -> Result<(), String> {
    let (key, last) = (parts[depth], depth + 1 == parts.len());
    if last {
        table.set(key, at.clone(), node);
        return Ok(());
    }
    if table.get(key).is_none() {
        if parts[depth + 1].parse::<usize>().is_ok() {
            return Err(format!("the recipe has no {}", parts[..=depth].join(".")));
        }
        table.set(key, at.clone(), Node { value: Value::Table(Table::default()), at: at.clone() });
    }
    match table.0.iter_mut().find(|e| e.key == key) {
        Some(e) => put_in_node(&mut e.node, parts, depth + 1, at, node),
        None => Ok(()),
    }
}

fn put_in_node(into: &mut Node, parts: &[&str], depth: usize, at: &At, node: Node) -> Result<(), String> {
    let above = parts[..depth].join(".");
    match &mut into.value {
        Value::Table(t) => put_in_table(t, parts, depth, at, node),
        Value::List(list) => {
            let count = list.len();
            let slot = parts[depth].parse::<usize>().ok().and_then(|i| list.get_mut(i));
            match slot {
                Some(slot) if depth + 1 == parts.len() => *slot = node,
                Some(slot) => return put_in_node(slot, parts, depth + 1, at, node),
                None if count == 0 => return Err(format!("{above} is empty: it has no {}", parts[depth])),
                None => {
                    let entries = if count == 1 { "entry" } else { "entries" };
                    let part = parts[depth];
                    return Err(format!("{above} has {count} {entries}, counted from 0: there is no {part}"));
                }
            }
            Ok(())
        }
        _ => Err(format!("{above} is a single value, nothing is inside it")),
    }
}

impl PartialEq for Value {
    /// TOML equality, ignoring positions. An integer equals a float of the same value.
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Value::Int(a), Value::Float(b)) | (Value::Float(b), Value::Int(a)) => *a as f64 == *b,
            (Value::Int(a), Value::Int(b)) => a == b,
            (Value::Float(a), Value::Float(b)) => a == b,
            (Value::Text(a), Value::Text(b)) | (Value::Date(a), Value::Date(b)) => a == b,
            (Value::Bool(a), Value::Bool(b)) => a == b,
            (Value::List(a), Value::List(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.value == y.value)
            }
            (Value::Table(a), Value::Table(b)) => {
                a.0.len() == b.0.len()
                    && a.0.iter().all(|e| b.get(&e.key).is_some_and(|n| n.value == e.node.value))
            }
            _ => false,
        }
    }
}

impl fmt::Display for Value {
    /// Formats as TOML on one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Text(s) => f.write_str(&quote(s)),
            Value::Int(i) => write!(f, "{i}"),
            Value::Float(x) => write!(f, "{x:?}"),
            Value::Bool(b) => write!(f, "{b}"),
            Value::Date(d) => f.write_str(d),
            Value::List(l) => {
                let parts: Vec<String> = l.iter().map(|n| n.value.to_string()).collect();
                write!(f, "[{}]", parts.join(", "))
            }
            Value::Table(t) => {
                let parts: Vec<String> =
                    t.0.iter().map(|e| format!("{} = {}", quote_key(&e.key), e.node.value)).collect();
                write!(f, "{{ {} }}", parts.join(", "))
            }
        }
    }
}

/// Formats `text` as a TOML string on one line.
pub(super) fn quote(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            c if c.is_control() => out.push_str(&format!("\\u{:04X}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Formats `key` as a TOML key, quoted if necessary.
pub(super) fn quote_key(key: &str) -> String {
    let bare = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    if bare { key.to_string() } else { quote(key) }
}
