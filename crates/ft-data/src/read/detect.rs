//! Format detection for sources without a format, from the first row.

use super::files::files;
use super::reader::Rows;
use crate::error::Error;
use crate::shape::{
    keys::preference,
    preference::PROMPTS,
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

/// The key of a row with this name, or with this name in other case.
pub(super) fn key_of<'a>(row: &'a Map<String, Value>, name: &str) -> Option<&'a String> {
    let exact = row.keys().find(|key| *key == name);
    exact.or_else(|| row.keys().find(|key| key.eq_ignore_ascii_case(name)))
}

/// Detects format and field names from the first row of a source that can be read. Names given in the recipe are
/// kept. Rows before it are reported with the other bad rows.
///
/// # Errors
/// Missing or empty files, and a row of unknown format, with a hint for the recipe.
pub fn detect(source: &ft_recipe::Source, resolve: &dyn Fn(&str) -> PathBuf) -> Result<Shape, Error> {
    fits(source, &row_of(source, resolve)?)
}

/// The shape of a source in the format of a task, with the field names of its first row.
///
/// # Errors
/// Missing or empty files.
pub fn shape_in(
    format: Format,
    source: &ft_recipe::Source,
    resolve: &dyn Fn(&str) -> PathBuf,
) -> Result<Shape, Error> {
    let row = row_of(source, resolve)?;
    let mut fields = source.fields.clone();
    let completion = ["chosen", "completion"].into_iter().find_map(|name| row.get(name));
    // lists and dialogues have their prompt inside
    let is_prompt = |name: &&&str| match (row.get(**name), completion) {
        (Some(Value::String(prompt)), Some(Value::String(completion))) => {
            // dialogues have it in both
            let rejected = row.get("rejected").and_then(Value::as_str).unwrap_or(completion);
            ![completion.as_str(), rejected].iter().all(|text| text.contains(prompt.trim()))
        }
        (Some(_), Some(completion)) => !completion.is_array(),
        _ => false,
    };
    if format.is_preference() && fields.is_empty() && key_of(&row, "prompt").is_none() {
        let name = PROMPTS.iter().find(is_prompt);
        fields.extend(name.map(|name| ("prompt".to_string(), name.to_string())));
    }
    Ok(Shape { format, fields: spelled(format, fields, &row) })
}

/// Field names as a row spells them.
fn spelled(
    format: Format,
    mut fields: BTreeMap<String, String>,
    row: &Map<String, Value>,
) -> BTreeMap<String, String> {
    // columns Weight and System mostly hold other data
    let exact = ["weight", "system", "tools", "history"];
    // alternatives: an exact name takes precedence
    let texts = ["text", "prompt", "input_ids", "messages", "conversations", "conversation"];
    let is_told = |name: &&str| row.contains_key(fields.get(*name).map_or(*name, String::as_str));
    let told = matches!(format, Format::Labeled | Format::Messages) && texts.iter().any(is_told);
    let skipped = |ours: &&&str| exact.contains(*ours) || told && texts.contains(*ours);
    for ours in format.keys(true).iter().filter(|ours| !skipped(ours)) {
        let name = fields.get(*ours).map_or(*ours, String::as_str);
        let other = key_of(row, name).filter(|key| *key != name).cloned();
        fields.extend(other.map(|key| (ours.to_string(), key)));
    }
    fields
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
    // exact names first: another column may differ from a format's name by case alone
    [false, true].into_iter().find_map(|any_case| shape_by(given, row, any_case))
}

/// As [`shape_of`], by exact names or by names in any case.
fn shape_by(given: &BTreeMap<String, String>, row: &Map<String, Value>, any_case: bool) -> Option<Shape> {
    let there = |name: &str| if any_case { key_of(row, name).is_some() } else { row.contains_key(name) };
    let has = |name: &&str| there(given.get(*name).map_or(*name, String::as_str));
    let known = SIGNS.iter().find(|(_, names)| names.iter().all(has));
    let mut fields = given.clone();
    let format = match known {
        Some((format, _)) => *format,
        None if fields.is_empty() => {
            let (format, names) = NAMES.iter().find(|(_, n)| n.iter().all(|(_, file)| there(file)))?;
            let others = names.iter().filter(|(ours, file)| ours != file);
            fields.extend(others.map(|(ours, file)| (ours.to_string(), file.to_string())));
            *format
        }
        None => return None,
    };
    if format.is_template_default()
        && !row.contains_key(given.get("system").map_or("system", String::as_str))
        && row.contains_key(SYSTEM)
    {
        fields.insert("system".into(), SYSTEM.into());
    }
    Some(Shape { format, fields: spelled(format, fields, row) })
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
    let is_text = |value: &Value| value.as_str().is_some_and(|text| text.parse::<f64>().is_err());
    let texts: Vec<&str> =
        row.iter().filter(|(_, value)| is_text(value)).map(|(key, _)| key.as_str()).collect();
    let pair = |prompt: &str, completion: &str| {
        format!("format = \"completion\", fields = {{ prompt = {prompt:?}, completion = {completion:?} }}")
    };
    let write = match texts.as_slice() {
        [text] => format!("format = \"text\", fields = {{ text = {text:?} }}"),
        [a, b] => pair(a, b),
        _ => format!("format and fields say how to read it, such as {}", pair("NAME", "OTHER")),
    };
    let names: Vec<String> =
        row.keys().take(12).map(|key| format!("\"{}\"", brief(&key.as_str().into()))).collect();
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
            (
                json!({"question": "", "answer": "", "Text": ""}),
                "format = \"completion\", fields = { prompt = \"question\", completion = \"answer\" }",
            ),
            (json!({"text": "", "Conversation": "c-17"}), "format = \"text\""),
            (
                json!({"QUESTION": "", "Answer": "", "Weight": "3 kg", "System": "Linux"}),
                "format = \"completion\", fields = { prompt = \"QUESTION\", completion = \"Answer\" }",
            ),
            (
                json!({"Instruction": "", "Input": "", "Output": ""}),
                "format = \"alpaca\", fields = { instruction = \"Instruction\", input = \"Input\", \
                 output = \"Output\" }",
            ),
        ] {
            assert_eq!(of(row), Ok(keys.to_string()));
        }
    }

    #[test]
    fn rows_of_no_format_get_a_hint() {
        for (row, hint) in [
            (json!({"content": "", "id": "7"}), "hint: format = \"text\", fields = { text = \"content\" }"),
            (json!({"document": "", "summary": ""}), "{ prompt = \"document\", completion = \"summary\" }"),
            (
                json!({"a, b": "", "c": "", "d": ""}),
                "it has \"a, b\", \"c\", \"d\"\n  hint: format and fields",
            ),
        ] {
            let told = of(row).unwrap_err();
            assert!(told.contains("fits none: ") && told.contains(hint), "{told}");
        }
    }

    #[test]
    fn pairs_name_their_prompt() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.jsonl");
        let source = crate::tests::source("a.jsonl", Format::Preference);
        let said = json!([{"role": "user", "content": "Hi"}]);
        for (row, prompt) in [
            (json!({"question": "Hi", "chosen": "a", "rejected": "b"}), Some("question")),
            (json!({"conversations": said, "chosen": {}, "rejected": {}}), Some("conversations")),
            (json!({"Prompt": "Hi", "chosen": "a", "rejected": "b", "input": "x"}), Some("Prompt")),
            (json!({"question": "Hi", "chosen": "Hi you", "rejected": "b"}), Some("question")),
            (json!({"question": "Hi", "chosen": "Human: Hi, a", "rejected": "Human: Hi, b"}), None),
            (json!({"question": "Hi", "chosen": said, "rejected": []}), None),
        ] {
            std::fs::write(&file, row.to_string()).unwrap();
            let shape = shape_in(Format::Preference, &source, &|_| file.clone()).unwrap();
            assert_eq!(shape.fields.get("prompt").map(String::as_str), prompt, "{row}");
        }
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
