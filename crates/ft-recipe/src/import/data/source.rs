//! A source of the recipe in the making.

use crate::import::context::{Context, Fate, Outcome, converted, needless};
use crate::import::read::text;
use crate::keys::{Format, inline};
use crate::syntax::quote;
use serde_json::Value;
use std::collections::BTreeMap;

/// Endings of files of rows.
const ROWS: [&str; 10] = ["arrow", "csv", "gz", "json", "jsonl", "ndjson", "parquet", "tsv", "txt", "zst"];

/// Names of a part of messages, or of a role, read as they are.
pub(super) fn names(part: &str) -> &'static [&'static str] {
    match part {
        "role" => &["role", "from"],
        "content" => &["content", "value"],
        "user" => &["user", "human"],
        "assistant" => &["assistant", "gpt", "chatgpt", "model"],
        "system" => &["system"],
        "tool" | "observation" => &["tool", "function", "observation", "function_response"],
        "function" => &["function_call"],
        _ => &[],
    }
}

/// One source.
#[derive(Clone, Debug, Default)]
pub(super) struct Source {
    pub source: String,
    /// Further keys, as TOML.
    pub keys: BTreeMap<&'static str, String>,
    /// Names of fields: the format's, and the file's.
    pub fields: BTreeMap<String, String>,
    /// The key that names the source.
    pub origin: String,
    /// Whether the key is absent from the file.
    pub by_default: bool,
}

impl Source {
    pub fn named(source: impl Into<String>, origin: impl Into<String>) -> Self {
        Self { source: source.into(), origin: origin.into(), ..Self::default() }
    }

    /// Whether the source is named as a file of rows.
    pub fn is_file(&self) -> bool {
        self.source.rsplit_once('.').is_some_and(|(_, ending)| ROWS.contains(&ending))
    }

    /// Whether the source is named as a data set of the hub: owner and name.
    pub fn is_of_hub(&self) -> bool {
        let id = self.source.strip_prefix("hf://datasets/").unwrap_or(&self.source);
        let of_two = id.split_once('/').is_some_and(|(_, name)| !name.is_empty() && !name.contains('/'));
        of_two && !id.starts_with(['.', '/', '~']) && !id.contains(['*', '?', '[', '$']) && !self.is_file()
    }

    /// Takes a text as it is.
    pub fn put(&mut self, key: &'static str, value: &Value) -> Outcome {
        match text(value).filter(|t| !t.is_empty()) {
            Some(t) => {
                self.keys.insert(key, quote(&t));
                Outcome(Fate::Taken, format!("{key} = {}", quote(&t)))
            }
            None => needless("not set"),
        }
    }

    pub fn format(&mut self, format: &str) -> Outcome {
        self.keys.insert("format", quote(format));
        converted(format!("format = {}", quote(format)))
    }

    /// Whether rows are known as lists of messages.
    pub fn is_of_messages(&self) -> bool {
        self.keys.get("format").is_some_and(|format| *format == quote(Format::Messages.word()))
    }

    /// Names a field of the format, if the file's name differs.
    pub fn field(&mut self, ours: &str, value: &Value) -> Outcome {
        match text(value).filter(|t| !t.is_empty()) {
            Some(theirs) if theirs == ours => {
                self.fields.remove(ours);
                needless("the format's own name")
            }
            Some(theirs) => {
                let shown = format!("fields = {{ {ours} = {} }}", quote(&theirs));
                self.fields.insert(ours.into(), theirs);
                converted(shown)
            }
            None => needless("not set"),
        }
    }

    /// A source for each of `files`, below `folder`; without files itself.
    pub fn of_files(self, files: &[String], folder: &str) -> Vec<Self> {
        if files.is_empty() {
            return vec![self];
        }
        files.iter().map(|file| Self { source: format!("{folder}{file}"), ..self.clone() }).collect()
    }

    /// Writes the source into the recipe.
    pub fn write(self, ctx: &mut Context<'_>, path: &str) {
        let mut put = |key: &str, value: String| {
            ctx.draft.set(&format!("{path}.{key}"), value, &self.origin, self.by_default);
        };
        put("source", quote(&self.source));
        for (key, value) in self.keys {
            put(key, value);
        }
        if !self.fields.is_empty() {
            put("fields", inline(self.fields.iter().map(|(k, v)| (k.as_str(), quote(v)))));
        }
    }
}

/// Keys of one data set: path in the file, key below the data set, value.
pub(super) type Keys = Vec<(String, String, Value)>;

/// Converts each data set below `prefix`.
pub(super) fn each(
    ctx: &mut Context<'_>,
    prefix: &str,
    convert: fn(&mut Context<'_>, &Keys) -> Vec<Source>,
) -> Vec<Source> {
    let mut sets: BTreeMap<usize, Keys> = BTreeMap::new();
    for e in ctx.entries.list.iter().filter(|e| e.line > 0) {
        let Some(rest) = e.path.strip_prefix(prefix).and_then(|r| r.strip_prefix('.')) else { continue };
        let (index, key) = match rest.split_once('.').map(|(i, k)| (i.parse(), k)) {
            Some((Ok(i), key)) => (i, key),
            _ => (0, rest),
        };
        sets.entry(index).or_default().push((e.path.clone(), key.into(), e.value.clone()));
    }
    sets.into_values().flat_map(|keys| convert(ctx, &keys)).collect()
}

/// The list entry of `keys`, or `default`.
pub(super) fn origin<'k>(keys: &'k Keys, default: &'k str) -> &'k str {
    keys.first().and_then(|(path, ..)| path.rsplit_once('.')).map_or(default, |(entry, _)| entry)
}

/// The value of a key of a data set.
pub(super) fn value<'k>(keys: &'k Keys, key: &str) -> Option<&'k Value> {
    keys.iter().find(|(_, k, _)| k == key).map(|(.., v)| v).filter(|v| !v.is_null())
}

/// The text of a key of a data set.
pub(super) fn word(keys: &Keys, key: &str) -> Option<String> {
    value(keys, key).and_then(text).filter(|t| !t.is_empty())
}
