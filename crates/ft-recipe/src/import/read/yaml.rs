//! YAML, JSON included: events of the parser to entries with lines.

use super::entries::{Entries, MOST, twice};
use super::scalar::scalar;
use saphyr_parser::{Event, Parser, ScalarStyle, Span};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

/// Depth of nesting at the most.
const DEEPEST: usize = 32;

/// Most bytes of text copied by aliases.
const MOST_COPIED: usize = 64 << 20;

/// Longest path in bytes. All values keep their paths.
const LONGEST_PATH: usize = 1024;

/// The parser's error at a line in brackets with less indentation than the key, and a quoted text or a bracket first.
/// It is valid YAML.
const SHALLOW: &str = "invalid indentation";
/// Such lines of a text at most.
const MOST_SHALLOW: usize = 64;

/// An unfinished list or table.
struct Open {
    value: Value,
    /// The key of a table's next value.
    key: Option<String>,
    anchor: usize,
    /// Empty unless lines are kept.
    path: String,
}

/// Reads the only document of `text`, a table.
pub(in crate::import) fn read(text: &str) -> Result<Entries, String> {
    let reader = read_document(text, MOST, true)?;
    match reader.root {
        Some(Value::Object(table)) => Ok(Entries::flat(&table, &reader.lines)),
        _ => Err("the file is no table of keys and values".into()),
    }
}

/// The value of the first YAML document of `text`; null without one.
///
/// # Errors
/// A syntax error with its line; more than `most` values, or aliases of more than 64 MiB.
pub fn value(text: &str, most: usize) -> Result<Value, String> {
    Ok(read_document(text, most, false)?.root.unwrap_or_default())
}

/// Reads the first document, with [`SHALLOW`] lines indented; `only` refuses a second one, and a repeated key of a
/// table.
fn read_document(text: &str, most: usize, only: bool) -> Result<Reader, String> {
    let mut text = Cow::Borrowed(text);
    let mut shallow = 0;
    loop {
        match events(&text, most, only) {
            Err((line, what)) if what == SHALLOW && shallow < MOST_SHALLOW => {
                let start: usize =
                    text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
                text.to_mut().insert_str(start, &" ".repeat(2 * DEEPEST));
                shallow += 1;
            }
            read => return read.map_err(|(line, what)| format!("line {line}: {what}")),
        }
    }
}

/// Reads the first document; an error has its line.
fn events(text: &str, most: usize, only: bool) -> Result<Reader, (usize, String)> {
    let mut reader = Reader { most, only, ..Reader::default() };
    let mut ended = false;
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|e| (e.marker().line(), e.info().to_string()))?;
        let line = span.start.line();
        match event {
            Event::DocumentEnd if only => ended = true,
            Event::DocumentEnd => break,
            Event::DocumentStart(_) if ended => {
                return Err((line, "a second document begins: write it into a file of its own".into()));
            }
            event => reader.event(event, span).map_err(|what| (line, what))?,
        }
    }
    Ok(reader)
}

#[derive(Default)]
struct Reader {
    open: Vec<Open>,
    anchors: HashMap<usize, Value>,
    root: Option<Value>,
    /// Line of each dotted path, if `only`.
    lines: BTreeMap<String, usize>,
    /// Values so far, with the copies for anchors and aliases.
    nodes: usize,
    /// Bytes of text copied by aliases.
    copied: usize,
    /// The most values.
    most: usize,
    /// Whether a repeated key of a table is an error.
    only: bool,
}

impl Reader {
    fn event(&mut self, event: Event<'_>, span: Span) -> Result<(), String> {
        match event {
            Event::Scalar(text, style, anchor, _) => {
                let plain = style == ScalarStyle::Plain;
                if let Some(Open { value: Value::Object(_), key: key @ None, .. }) = self.open.last_mut() {
                    *key = Some(text.into_owned());
                    if !self.only {
                        return Ok(());
                    }
                    let path = self.path()?;
                    // merge keys may stand twice
                    let once = !path.ends_with("<<");
                    return match self.lines.insert(path.clone(), span.start.line()) {
                        Some(first) if once => Err(twice(&path, first)),
                        _ => Ok(()),
                    };
                }
                let value = if plain { scalar(&text) } else { Value::from(text.into_owned()) };
                self.put(value, anchor)
            }
            Event::SequenceStart(anchor, _) => self.start(Value::Array(Vec::new()), anchor, span),
            Event::MappingStart(anchor, _) => self.start(Value::Object(Map::new()), anchor, span),
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some(closed) => self.put(closed.value, closed.anchor),
                None => Err("an end without a beginning".into()),
            },
            Event::Alias(anchor) => {
                let value = self.anchors.get(&anchor).ok_or("an alias of nothing")?;
                self.nodes += count(value);
                self.copied += text_bytes(value);
                if self.copied > MOST_COPIED {
                    return Err(format!("aliases of more than {} MiB", MOST_COPIED >> 20));
                }
                let value = value.clone();
                self.put(value, 0)
            }
            _ => Ok(()),
        }
    }

    /// The path of the next value.
    fn path(&self) -> Result<String, String> {
        let path = match self.open.last() {
            None => String::new(),
            Some(Open { value: Value::Array(list), path, .. }) => {
                crate::syntax::join(path, &list.len().to_string())
            }
            Some(Open { key, path, .. }) => crate::syntax::join(path, key.as_deref().unwrap_or_default()),
        };
        match path.len() {
            ..=LONGEST_PATH => Ok(path),
            n => Err(format!("a path of {n} bytes, more than {LONGEST_PATH}")),
        }
    }

    fn start(&mut self, value: Value, anchor: usize, span: Span) -> Result<(), String> {
        if self.open.len() >= DEEPEST {
            return Err(format!("nested more than {DEEPEST} deep"));
        }
        if let Some(Open { value: Value::Object(_), key: None, .. }) = self.open.last() {
            return Err("a list or table as a key".into());
        }
        let mut path = String::new();
        if self.only {
            path = self.path()?;
            self.lines.entry(path.clone()).or_insert(span.start.line());
        }
        self.open.push(Open { value, key: None, anchor, path });
        Ok(())
    }

    /// Adds a finished value to the open list or table, or makes it the root.
    fn put(&mut self, value: Value, anchor: usize) -> Result<(), String> {
        self.nodes += if anchor > 0 { 1 + count(&value) } else { 1 };
        if self.nodes > self.most {
            return Err(format!("more than {} values", self.most));
        }
        if anchor > 0 {
            self.anchors.insert(anchor, value.clone());
        }
        match self.open.last_mut() {
            None => self.root = self.root.take().or(Some(value)),
            Some(Open { value: Value::Array(list), .. }) => list.push(value),
            Some(Open { value: Value::Object(table), key, .. }) => match (key.take(), value) {
                // a merge key: the table's own keys win, then earlier tables
                (Some(k), merged) if k == "<<" && merges(&merged) => {
                    let tables = match merged {
                        Value::Array(list) => list,
                        one => vec![one],
                    };
                    for (k, v) in tables.into_iter().filter_map(|t| t.as_object().cloned()).flatten() {
                        table.entry(k).or_insert(v);
                    }
                }
                (Some(k), value) => {
                    table.insert(k, value);
                }
                (None, _) => return Err("a value without a key".into()),
            },
            Some(_) => return Err("a value inside a value".into()),
        }
        Ok(())
    }
}

/// Whether a value is a table, or a list of tables.
fn merges(value: &Value) -> bool {
    value.is_object() || value.as_array().is_some_and(|list| list.iter().all(Value::is_object))
}

/// Values in a value, itself included.
fn count(value: &Value) -> usize {
    match value {
        Value::Array(list) => 1 + list.iter().map(count).sum::<usize>(),
        Value::Object(table) => 1 + table.values().map(count).sum::<usize>(),
        _ => 1,
    }
}

/// Bytes of text in a value, keys included.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(text_bytes).sum(),
        Value::Object(table) => table.iter().map(|(key, value)| key.len() + text_bytes(value)).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaves(text: &str) -> String {
        let entries = read(text).unwrap();
        entries.list.iter().map(|e| format!("{}:{}={}\n", e.line, e.path, e.value)).collect()
    }

    #[test]
    fn tables_lists_and_anchors_have_lines() {
        let text = "a: 1e-5\nb:\n  - {c: yes, d: 'yes'}\n  - c: \"no\"\n    # more\n    d: [x, 2]\ne: &x {f: 1}\ng:\n  <<: *x\n  h: ~\n";
        insta::assert_snapshot!(leaves(text), @r#"
        1:a=0.00001
        3:b.0.c=true
        3:b.0.d="yes"
        4:b.1.c="no"
        6:b.1.d=["x",2]
        7:e.f=1
        8:g.f=1
        10:g.h=null
        "#);
        assert_eq!(leaves("{\"a\": {\"b\": 1.5},\n \"c\": []}"), "1:a.b=1.5\n2:c=[]\n");
    }

    /// References between values, in a chain and in a circle.
    #[test]
    fn values_are_filled_in() {
        let entries = read("a: ${b}/x\nb: ${c}/y\nc: z\nd: ${d}${d}\ne: ${f}\n").unwrap();
        let texts = ["a", "b", "e"].map(|key| entries.get(key).and_then(Value::as_str));
        assert_eq!(texts, [Some("z/y/x"), Some("z/y"), Some("${f}")]);
        assert!(entries.get("d").and_then(Value::as_str).is_some_and(|d| d.len() < 1 << 20));
    }

    #[test]
    fn bad_and_huge_files_are_errors() {
        assert!(read("a: [1").unwrap_err().starts_with("line "), "{:?}", read("a: [1"));
        assert!(read("- 1\n- 2").unwrap_err().contains("no table"));
        assert!(read("a: 1\n---\nb: 2\n").unwrap_err().starts_with("line 2: a second document"));
        assert_eq!(read("---\na: 1\n...\n").unwrap().list.len(), 1);
        assert_eq!(value("a: 1\n---\nb: 2\n", 9).unwrap()["b"], Value::Null, "the first document");
        assert!(read(&format!("a: {}", "[".repeat(100))).unwrap_err().contains("deep"));
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_string();
        for i in 1..9 {
            let last = format!("*a{}", i - 1);
            bomb += &format!("a{i}: &a{i} [{}]\n", [last.as_str(); 10].join(", "));
        }
        assert!(read(&bomb).unwrap_err().contains("more than"));
        let copies = |n: usize| {
            value(&format!("a: &a [{}]\nb: [{}]", "x".repeat(1 << 20), ["*a"; 65][..n].join(", ")), 1000)
        };
        assert!(copies(64).is_ok());
        assert!(copies(65).unwrap_err().ends_with("line 2: aliases of more than 64 MiB"));
    }

    /// Lists of an import keep their paths, lists of a card do not.
    #[test]
    fn long_paths_are_refused_where_lines_are_kept() {
        let text = |n: usize| format!("? {}\n: [[], [1]]", "k".repeat(n));
        assert!(read(&text(1000)).is_ok());
        assert_eq!(read(&text(1025)).unwrap_err(), "line 1: a path of 1025 bytes, more than 1024");
        let lists = format!("? {}\n: [{}]", "k".repeat(1 << 16), "[],".repeat(1000));
        let reader = read_document(&lists, 2000, false).unwrap();
        assert!(reader.lines.is_empty());
        assert!(reader.root.is_some_and(|root| root.as_object().is_some_and(|table| table.len() == 1)));
    }

    /// Lines of a list in brackets may be indented less than its key.
    #[test]
    fn brackets_end_indentation() {
        let names = serde_json::json!(["a", "b"]);
        for text in ["k: [\n  \"a\",\n  'b'\n]\nl: 1\n", "k: [\n\"a\",\n\"b\"\n]\nl: 1\n"] {
            let read = read(text).unwrap();
            assert_eq!(read.get("k"), Some(&names), "{text}");
            assert_eq!(read.list.iter().map(|e| e.line).collect::<Vec<_>>(), [1, text.lines().count()]);
        }
        let nested = "o:\n  k: [\n    \"a\",\n    \"b\",\n  ]\n  m: {\n    \"n\": \"b\"\n}\n";
        assert_eq!(value(nested, 99).unwrap(), serde_json::json!({"o": {"k": names, "m": {"n": "b"}}}));
        let endless = "k: [\"a\"\n]\n".repeat(MOST_SHALLOW + 1);
        assert!(value(&endless, 999).unwrap_err().ends_with("invalid indentation"));
    }

    /// Keys of a merged table may be given again; the tables of dataset cards may have keys twice.
    #[test]
    fn a_key_stands_once_in_a_table() {
        let text = "a: 1\nb:\n  - {c: 1}\n  - {c: 1,\n     c: 2}\n";
        assert_eq!(read(text).unwrap_err(), "line 5: b.1.c is given twice, first in line 4: leave one out");
        assert_eq!(value(text, 9).unwrap()["b"][1]["c"], 2);
        assert_eq!(
            read("a: 1\na: 1\n").unwrap_err(),
            "line 2: a is given twice, first in line 1: leave one out"
        );
        let merged = read("e: &x {f: 1}\ng: &y {h: 1}\ni:\n  <<: *x\n  <<: *y\n  f: 2\n").unwrap();
        assert_eq!((merged.get("i.f"), merged.get("i.h")), (Some(&2.into()), Some(&1.into())));
        let listed = read("e: &x {f: 1}\ng: &y {f: 3, h: 1}\ni:\n  <<: [*x, *y]\n  k: 2\n").unwrap();
        let keys = ["i.f", "i.h", "i.k"].map(|key| listed.get(key).cloned());
        assert_eq!(keys, [1, 1, 2].map(|n| Some(Value::from(n))));
    }

    #[test]
    fn nested_values_count_once() {
        // the table, the list, 2 entries and their 2 values
        let text = "a: [{b: 1}, {b: 2}]";
        assert!(value(text, 6).is_ok());
        assert!(value(text, 5).unwrap_err().ends_with("more than 5 values"));
    }

    #[test]
    fn copies_count_with_the_values_inside() {
        // the root, a table of one value, and its copies for the anchor and the alias
        assert!(value("a: &x {b: 1}\nc: *x", 6).unwrap_err().ends_with("more than 6 values"));
    }
}
