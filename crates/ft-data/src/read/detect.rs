//! Format detection for sources without a format, from the first row.

use super::files::files;
use super::reader::Rows;
use crate::error::{Error, Problem};
use crate::shape::{schema::Schema, values::brief};
use ft_base::error::Place;
use ft_recipe::Format;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Fields that identify a format, most specific first.
const SIGNS: &[(Format, &[&str])] = &[
    (Format::Messages, &["messages"]),
    (Format::Messages, &["conversations"]),
    (Format::Tokens, &["input_ids"]),
    (Format::Alpaca, &["instruction", "output"]),
    (Format::Completion, &["prompt", "completion"]),
    (Format::Text, &["text"]),
];
/// Common names for prompt and completion.
const PAIRS: &[[&str; 2]] = &[
    ["prompt", "response"],
    ["prompt", "output"],
    ["prompt", "answer"],
    ["prompt", "chosen"],
    ["question", "answer"],
    ["question", "response"],
    ["query", "response"],
    ["query", "answer"],
    ["input", "output"],
    ["instruction", "response"],
    ["instruction", "answer"],
    ["source", "target"],
];
/// Common names for text.
const TEXTS: &[&str] = &["content", "body", "document", "sentence", "article"];

/// Detects the format from the first row of a source.
///
/// # Errors
/// Missing or empty files, and a row of unknown format, with a hint for the recipe.
pub fn detect_format(source: &ft_recipe::Source, resolve: &dyn Fn(&str) -> PathBuf) -> Result<Format, Error> {
    fits(source, &row_of(source, resolve)?)
}

/// Suggests TOML keys for a source with common but unmapped field names in the first row. `None` if a
/// format is detected or no names match.
pub fn suggest_fields(source: &ft_recipe::Source, resolve: &dyn Fn(&str) -> PathBuf) -> Option<String> {
    match row_of(source, resolve) {
        Ok(Value::Object(row)) if format_of(source, &row).is_none() => by_names(&row),
        _ => None,
    }
}

/// The first row of the first non-empty file.
fn row_of(source: &ft_recipe::Source, resolve: &dyn Fn(&str) -> PathBuf) -> Result<Value, Error> {
    let mut last = None;
    for path in files(source, resolve)? {
        if let Some(row) = first(&path)? {
            return Ok(row);
        }
        last = Some(path);
    }
    let file = last.map_or_else(|| source.source.clone(), |p| p.display().to_string());
    Err(Error::Empty { file, message: "the file holds no rows".into() })
}

/// The format matching the fields of a row.
fn format_of(source: &ft_recipe::Source, row: &Map<String, Value>) -> Option<Format> {
    let has = |name: &&str| row.contains_key(source.fields.get(*name).map_or(*name, String::as_str));
    SIGNS.iter().find(|(_, names)| names.iter().all(has)).map(|(format, _)| *format)
}

/// Suggested keys for a row with common field names.
fn by_names(row: &Map<String, Value>) -> Option<String> {
    let has = |name: &&str| row.contains_key(*name);
    let pair = PAIRS.iter().find(|p| p.iter().all(has)).map(|[a, b]| {
        format!("format = \"completion\", fields = {{ prompt = \"{a}\", completion = \"{b}\" }}")
    });
    let text = || TEXTS.iter().find(|t| has(t));
    pair.or_else(|| text().map(|t| format!("format = \"text\", fields = {{ text = \"{t}\" }}")))
}

/// The first row of a file.
fn first(path: &Path) -> Result<Option<Value>, Error> {
    let Some(row) = Rows::open(path, &Schema::of_any())?.next() else { return Ok(None) };
    let bad = |e: super::row::ParseError| Error::Row {
        place: Place { file: path.display().to_string(), line: e.line, column: e.column },
        problem: Problem::Bad(e.message),
    };
    row?.parse().map(Some).map_err(bad)
}

fn fits(source: &ft_recipe::Source, row: &Value) -> Result<Format, Error> {
    let fail = |why: String| {
        let message = format!("{:?} has no format, and its first row {why}", source.source);
        Err(Error::recipe(source, message))
    };
    let Value::Object(row) = row else { return fail("is no object".into()) };
    if let Some(format) = format_of(source, row) {
        return Ok(format);
    }
    let write = by_names(row).unwrap_or_else(|| {
        "format and fields say how to read it: fields = { prompt = \"the file's name\", .. }".into()
    });
    let names: Vec<String> = row.keys().take(12).map(|k| brief(&k.as_str().into())).collect();
    fail(format!("fits none: it has {}\n  hint: {write}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(row: Value) -> Result<Format, String> {
        let source = ft_recipe::Source { format: None, ..crate::tests::source("a.jsonl", Format::Text) };
        fits(&source, &row).map_err(|e| e.to_string())
    }

    #[test]
    fn rows_show_their_format() {
        assert_eq!(of(json!({"messages": []})), Ok(Format::Messages));
        assert_eq!(of(json!({"id": 1, "conversations": []})), Ok(Format::Messages));
        assert_eq!(of(json!({"instruction": "", "input": "", "output": "", "text": ""})), Ok(Format::Alpaca));
        assert_eq!(of(json!({"prompt": "", "completion": ""})), Ok(Format::Completion));
        assert_eq!(of(json!({"input_ids": [], "attention_mask": []})), Ok(Format::Tokens));
        assert_eq!(of(json!({"text": "", "meta": {}})), Ok(Format::Text));
    }

    #[test]
    fn other_rows_are_told_what_to_write() {
        let told = of(json!({"question": "", "answer": "", "id": 3})).unwrap_err();
        assert!(told.contains("fits none: it has question, answer, id"), "{told}");
        assert!(told.contains("fields = { prompt = \"question\", completion = \"answer\" }"), "{told}");
        assert!(of(json!({"content": ""})).unwrap_err().contains("fields = { text = \"content\" }"));
        assert!(of(json!([1])).unwrap_err().contains("is no object"));
    }
}
