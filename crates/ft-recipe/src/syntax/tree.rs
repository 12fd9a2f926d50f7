//! TOML as a tree with source positions.

use super::diagnostic::{Diagnostic, MAX_PROBLEMS, SourceText, Span};
use std::fmt;
use toml::de::{DeTable, DeValue};

/// A value with position.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub value: Value,
    pub at: Span,
}

/// A TOML value.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Text(String),
    /// Wider than TOML's 64 bits, to report an out-of-range number.
    Int(i128),
    Float(f64),
    Bool(bool),
    Date(String),
    List(Vec<Node>),
    Table(Table),
}

/// Entries in file order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table(pub Vec<Entry>);

/// One key of a table.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub key: String,
    pub key_at: Span,
    pub node: Node,
}

impl Table {
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.0.iter().find(|e| e.key == key).map(|e| &e.node)
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

    /// Calls `f` with the dotted path and position of every node.
    pub fn walk(&self, prefix: &str, f: &mut dyn FnMut(String, &Span)) {
        for e in &self.0 {
            visit(&e.node, join(prefix, &e.key), f);
        }
    }
}

fn visit(node: &Node, path: String, f: &mut dyn FnMut(String, &Span)) {
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
pub(crate) fn join(prefix: &str, key: &str) -> String {
    if prefix.is_empty() { key.to_string() } else { format!("{prefix}.{key}") }
}

/// A dotted path, and the paths of enclosing tables, inner ones first.
pub(crate) fn enclosing(path: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(path), |path| path.rsplit_once('.').map(|(above, _)| above))
}

/// Parses `texts[0]` as TOML. Returns syntax errors as problems, along with the recoverable part of the tree.
pub(crate) fn read(texts: &[SourceText]) -> (Table, Vec<Diagnostic>) {
    let (table, errors) = DeTable::parse_recoverable(&texts[0].text);
    // Further errors on a line are usually consequences of the first.
    let mut last = None;
    let problems = errors
        .iter()
        .take(MAX_PROBLEMS)
        .map(|e| {
            let at = Span { text: 0, bytes: e.span().unwrap_or(0..0) };
            Diagnostic::new(texts, &at, format!("TOML: {}", e.message()))
        })
        .filter(|d| last.replace(d.place.line) != Some(d.place.line))
        .collect();
    (convert_table(table.get_ref(), 0, 0), problems)
}

/// Parses `text` as a single TOML value.
pub(crate) fn parse_value(text: &str) -> Option<Node> {
    let (table, problems) = read(&[SourceText::file(String::new(), format!("v={text}"))]);
    let mut entries = table.0.into_iter();
    let first = entries.next().filter(|_| problems.is_empty())?;
    entries.next().is_none().then_some(first.node)
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

fn at(text: usize, span: std::ops::Range<usize>, shift: usize) -> Span {
    Span { text, bytes: span.start + shift..span.end + shift }
}

pub(super) fn convert(value: &DeValue<'_>, place: Span, text: usize, shift: usize) -> Node {
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
pub(crate) fn quote(text: &str) -> String {
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
pub(crate) fn quote_key(key: &str) -> String {
    let bare = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    if bare { key.to_string() } else { quote(key) }
}
