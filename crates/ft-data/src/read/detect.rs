//! Format detection for sources without a format, from the first row.

use super::files::files;
use super::reader::Rows;
use crate::error::Error;
use crate::shape::{
    keys::preference,
    schema::Schema,
    values::{brief, kind},
};
use ft_base::error::Location;
use ft_recipe::{Format, Task};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Fields that identify a format, most specific first.
const SIGNS: &[(Format, &[&str])] = &[
    (Format::Messages, &["messages"]),
    (Format::Messages, &["conversations"]),
    (Format::Messages, &["conversation"]),
    (Format::Tokens, &["input_ids"]),
    (Format::Alpaca, &["instruction", "output"]),
    (Format::Completion, &["prompt", "completion"]),
    (Format::Text, &["text"]),
];
/// Other names of a format's fields: all of them occur.
const NAMES: &[(Format, &[(&str, &str)])] = &[
    (Format::Completion, &[("prompt", "prompt"), ("completion", "response")]),
    (Format::Completion, &[("prompt", "prompt"), ("completion", "output")]),
    (Format::Completion, &[("prompt", "prompt"), ("completion", "answer")]),
    (Format::Completion, &[("prompt", "question"), ("completion", "answer")]),
    (Format::Completion, &[("prompt", "question"), ("completion", "response")]),
    (Format::Completion, &[("prompt", "query"), ("completion", "response")]),
    (Format::Completion, &[("prompt", "query"), ("completion", "answer")]),
    (Format::Alpaca, &[("instruction", "instruction"), ("input", "context"), ("output", "response")]),
    (Format::Alpaca, &[("instruction", "instruction"), ("output", "response")]),
    (Format::Alpaca, &[("instruction", "instruction"), ("output", "answer")]),
    (Format::Completion, &[("prompt", "input"), ("completion", "output")]),
    (Format::Completion, &[("prompt", "source"), ("completion", "target")]),
];
/// Another name of the field `system`.
const SYSTEM: &str = "system_prompt";
/// Rows searched for one that can be read.
const FIRST_ROWS: usize = 1000;
/// Common names for text.
const TEXTS: &[&str] = &["content", "body", "document", "sentence", "article"];

/// How to read the rows of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Format of the rows.
    pub format: Format,
    /// Fields with other names in the file: the format's name to the file's.
    pub fields: BTreeMap<String, String>,
}

impl Shape {
    /// The recipe keys of the shape.
    pub fn keys(&self) -> String {
        let format = format!("format = {:?}", self.format.word());
        if self.fields.is_empty() {
            return format;
        }
        let order = |name: &str| self.format.keys(true).iter().position(|n| *n == name);
        let mut fields: Vec<_> = self.fields.iter().collect();
        fields.sort_by_key(|(ours, _)| order(ours));
        let each: Vec<String> = fields.into_iter().map(|(ours, file)| format!("{ours} = {file:?}")).collect();
        format!("{format}, fields = {{ {} }}", each.join(", "))
    }
}

/// Detects format and field names from the first row of a source that can be read. Names given in the recipe are
/// kept. Rows before it are reported with the other bad rows.
///
/// # Errors
/// Missing or empty files, and a row of unknown format, with a hint for the recipe.
pub fn detect(source: &ft_recipe::Source, resolve: &dyn Fn(&str) -> PathBuf) -> Result<Shape, Error> {
    fits(source, &row_of(source, resolve)?)
}

/// The task of rows, by the first of them: pairs, rated completions, tokens with a teacher's values, or others.
///
/// # Errors
/// Missing or empty files.
pub fn task_of(source: &ft_recipe::Source, resolve: &dyn Fn(&str) -> PathBuf) -> Result<Task, Error> {
    let row = row_of(source, resolve)?;
    let has = |keys: &[&str]| keys.iter().all(|key| row.get(*key).is_some_and(|v| !v.is_null()));
    let tasks: [(Task, &[&str]); 5] = [
        (Task::Dpo, &["chosen", "rejected"]),
        (Task::Dpo, &["chosen_ids", "rejected_ids"]),
        (Task::Kto, &["completion", "label"]),
        (Task::Kto, &["completion_ids", "label"]),
        (Task::Distill, &["input_ids", "teacher_ids"]),
    ];
    Ok(tasks.into_iter().find(|(_, keys)| has(keys)).map_or(Task::Sft, |(task, _)| task))
}

/// The first row of the first non-empty file.
fn row_of(
    source: &ft_recipe::Source,
    resolve: &dyn Fn(&str) -> PathBuf,
) -> Result<Map<String, Value>, Error> {
    let mut last = None;
    for path in files(source, resolve)? {
        if let Some(row) = first(&path, source)? {
            return Ok(row);
        }
        last = Some(path);
    }
    let file = last.map_or_else(|| source.source.clone(), |p| p.display().to_string());
    Err(Error::Empty { file, message: "the file holds no rows".into() })
}

/// The shape matching the fields of a row; `given` has names in the file, by the format's.
pub(crate) fn shape_of(given: &BTreeMap<String, String>, row: &Map<String, Value>) -> Option<Shape> {
    let has = |name: &&str| row.contains_key(given.get(*name).map_or(*name, String::as_str));
    let known = SIGNS.iter().find(|(_, names)| names.iter().all(has));
    let mut fields = given.clone();
    let format = match known {
        Some((format, _)) => *format,
        None if fields.is_empty() => {
            let (format, names) =
                NAMES.iter().find(|(_, n)| n.iter().all(|(_, file)| row.contains_key(*file)))?;
            let others = names.iter().filter(|(ours, file)| ours != file);
            fields.extend(others.map(|(ours, file)| (ours.to_string(), file.to_string())));
            *format
        }
        None => return None,
    };
    if format.is_template_default() && !has(&"system") && row.contains_key(SYSTEM) {
        fields.insert("system".into(), SYSTEM.into());
    }
    Some(Shape { format, fields })
}

/// The first object among the file's first rows.
fn first(path: &Path, source: &ft_recipe::Source) -> Result<Option<Map<String, Value>>, Error> {
    let mut told = None;
    for row in Rows::open(path, &Schema::of_any(source)?)?.take(FIRST_ROWS) {
        let row = row?;
        let (line, column, message) = match row.parse() {
            Ok(Value::Object(row)) => return Ok(Some(row)),
            Ok(other) => (row.line, row.column, format!("expected an object, found {}", kind(&other))),
            Err(e) => (e.line, e.column, e.message),
        };
        told.get_or_insert((line, column, message));
    }
    told.map_or(Ok(None), |(line, column, message)| {
        let place = Location { file: path.display().to_string(), line, column };
        Err(Error::File { place, message })
    })
}

fn fits(source: &ft_recipe::Source, row: &Map<String, Value>) -> Result<Shape, Error> {
    let fail = |why: String| {
        let message = format!("{:?} has no format, and its first row {why}", source.source);
        Err(Error::recipe(source, message))
    };
    if let Some(why) = preference(row).filter(|_| source.fields.is_empty()) {
        return fail(format!("has {why}"));
    }
    if let Some(shape) = shape_of(&source.fields, row) {
        return Ok(shape);
    }
    let text = TEXTS.iter().find(|t| row.contains_key(**t));
    let write = match text {
        Some(t) => format!("format = \"text\", fields = {{ text = \"{t}\" }}"),
        None => "format and fields say how to read it: fields = { prompt = \"the file's name\", .. }".into(),
    };
    let names: Vec<String> = row.keys().take(12).map(|k| brief(&k.as_str().into())).collect();
    fail(format!("fits none: it has {}\n  hint: {write}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(row: Value) -> Result<String, String> {
        let row = row.as_object().unwrap();
        let source =
            ft_recipe::Source { format: None, form: None, ..crate::tests::source("a.jsonl", Format::Text) };
        fits(&source, row).map(|s| s.keys()).map_err(|e| e.to_string())
    }

    #[test]
    fn a_format_is_detected_from_the_keys_of_a_row() {
        for (row, keys) in [
            (json!({"messages": []}), "format = \"messages\""),
            (json!({"id": 1, "conversations": []}), "format = \"messages\""),
            (json!({"conversation": []}), "format = \"messages\""),
            (json!({"instruction": "", "input": "", "output": "", "text": ""}), "format = \"alpaca\""),
            (json!({"prompt": "", "completion": ""}), "format = \"completion\""),
            (json!({"input_ids": [], "attention_mask": []}), "format = \"tokens\""),
            (json!({"text": "", "meta": {}}), "format = \"text\""),
            (
                json!({"question": "", "answer": "", "id": 3}),
                "format = \"completion\", fields = { prompt = \"question\", completion = \"answer\" }",
            ),
            (
                json!({"instruction": "", "context": "", "response": "", "category": ""}),
                "format = \"alpaca\", fields = { input = \"context\", output = \"response\" }",
            ),
            (
                json!({"system_prompt": "", "question": "", "response": ""}),
                "format = \"completion\", fields = { prompt = \"question\", completion = \"response\", \
                 system = \"system_prompt\" }",
            ),
        ] {
            assert_eq!(of(row), Ok(keys.to_string()));
        }
    }

    #[test]
    fn rows_of_no_format_get_a_hint() {
        assert!(of(json!({"content": ""})).unwrap_err().contains("fields = { text = \"content\" }"));
        assert!(of(json!({"a": "", "b": ""})).unwrap_err().contains("fits none: it has a, b"));
    }

    #[test]
    fn bad_rows_before_the_first_good_one_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.jsonl");
        let source = crate::tests::source("a.jsonl", Format::Tokens);
        let found = || detect(&source, &|_| file.clone()).map(|s| s.format);
        for bad in ["{broken", "[1]", "\"a\""] {
            std::fs::write(&file, format!("{bad}\n{{\"text\": \"\"}}\n")).unwrap();
            assert_eq!(found().unwrap(), Format::Text, "{bad}");
        }
        std::fs::write(&file, "7\n{worse\n").unwrap();
        assert!(found().unwrap_err().to_string().contains("a.jsonl:1:1: expected an object, found a number"));
        std::fs::write(&file, "{broken\n{worse\n").unwrap();
        assert!(found().unwrap_err().to_string().contains("a.jsonl:1:2: not JSON"));
    }

    #[test]
    fn pairs_of_preferences_are_refused() {
        for row in [
            json!({"prompt": "Hi", "chosen": "a", "rejected": "b"}),
            json!({"chosen": "\n\nHuman: Hi\n\nAssistant: a", "rejected": "\n\nHuman: Hi\n\nAssistant: b"}),
            json!({"messages": [], "chosen": [{}], "rejected": [{}]}),
        ] {
            let told = of(row).unwrap_err();
            assert!(told.contains("a pair of preferences") && told.contains("hint:"), "{told}");
        }
    }
}
