//! Keys of a row: read, refused by name, or accepted with a warning.
//!
//! Keys that affect training in other trainers are refused unless ft reads them; ignoring them would train
//! something the author did not intend. All remaining keys (`id`, `source`) have no effect on training;
//! they are accepted, and reported by name with a count.

use super::notes::Note;
use super::schema::Schema;
use ft_recipe::{Format, ScoreTargets};
use serde_json::{Map, Value};
use std::borrow::Cow;

/// Media attached to a text.
const MEDIA: &[&str] = &["images", "image", "videos", "video", "audios", "audio"];
/// Keys used by other trainers to select supervised messages.
const SUPERVISION: &[&str] =
    &["train", "training", "trainable", "train_detail", "training_detail", "loss", "mask", "masked"];
/// Texts that programs write for a missing value.
const NULLS: &[&str] = &["NULL", "nan", "NaN", "None"];
/// Keys of a message with the assistant's reasoning, in transformers' order: the first with a value counts.
pub(crate) const REASONING: &[&str] = &["reasoning_content", "thinking", "reasoning"];

/// The reason for refusing a key, if the format does not read it and it matters for training.
fn refused((schema, scores): (&Schema, &ScoreTargets), key: &str) -> Option<String> {
    let (format, chat) = (schema.format, schema.chat);
    if MEDIA.contains(&key) {
        return (format != Format::Tokens).then(|| format!("not built yet: {key} of a row"));
    }
    let why = match (format, key) {
        (Format::Messages, "functions") => "write the functions as tools",
        (_, "chat_template_kwargs") if chat => {
            "variables for the chat template go into data.template, for all rows"
        }
        (Format::Messages, "history") => "write earlier turns as messages",
        (Format::Alpaca | Format::Completion, "functions") if chat => "write the functions as tools",
        (Format::Alpaca | Format::Completion, "tools" | "functions") => "tools need form = \"chat\"",
        (Format::Completion, "history") if chat => "write earlier turns as messages, in prompt",
        (Format::Completion, "system" | "history") => "write it into prompt, as the model is to read it",
        (Format::Tokens, "loss_mask" | "completion_mask" | "assistant_masks" | "assistant_mask") => {
            "labels say what is supervised: -100 where it is not"
        }
        (Format::Tokens, "position_ids") => "positions of a row count from 0",
        (Format::Completion, "label") => {
            "a judgment of the completion, which task = \"sft\" does not read; keep the rows to learn from, \
             and leave it out, or take task = \"kto\""
        }
        (Format::Labeled, "labels") => {
            "several labels of a text (multi-label classification) are not built; label is the one class"
        }
        (Format::Labeled, "completion" | "answer" | "output") => {
            "a classifier reads one text: write what it is to read as text, prompt or messages"
        }
        (Format::Preference | Format::Unpaired, "weight" | "weights") => {
            "pairs and rated completions have no weights; a source has one (weight = 2.0)"
        }
        (Format::Preference, "margin") if *scores == ScoreTargets::Pairs => {
            "the loss of task = \"reward\" has no margin, which other trainers subtract from the difference of scores; \
             leave it out to train without"
        }
        (_, "weights") => "only format \"tokens\" has a weight for each token; a row has one weight",
        _ => return None,
    };
    Some(format!("{key}: {why}"))
}

/// Describes a row of preference data: a better and a worse answer.
pub(crate) fn preference(row: &Map<String, Value>) -> Option<String> {
    let chosen = row.get("chosen").filter(|v| !says_nothing(v))?;
    row.get("rejected").filter(|v| !says_nothing(v))?;
    let how = match chosen {
        Value::Array(_) => "format = \"messages\", fields = { messages = \"chosen\" }",
        _ if row.contains_key("prompt") => "format = \"completion\", fields = { completion = \"chosen\" }",
        _ => "format = \"text\", fields = { text = \"chosen\" }",
    };
    Some(format!(
        "chosen and rejected, a pair of preferences: task = \"dpo\" learns them, task = \"sft\" does not\n  \
         hint: {how} trains on the chosen answers alone"
    ))
}

/// Whether a value is null, blank or empty, as is common in tables with mixed rows.
pub(crate) fn says_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(s) => s.trim().is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Checks the keys of a row not covered by `read`: refuses some, adds notes for the rest. `scores` are the targets of a
/// score head.
///
/// # Errors
/// A key that would change training.
pub(super) fn of_row(
    row: &Map<String, Value>,
    (schema, scores): (&Schema, &ScoreTargets),
    read: &dyn Fn(&str) -> bool,
    notes: &mut Vec<Note>,
) -> Result<(), String> {
    if !["chosen", "rejected"].into_iter().any(read)
        && let Some(why) = preference(row)
    {
        let rated = "chosen and rejected, a pair of preferences: task = \"dpo\" learns them; task = \"kto\" takes a \
                     completion a row, with its label";
        return Err(if schema.format == Format::Unpaired { rated.into() } else { why });
    }
    if schema.format.is_preference()
        && schema.name("prompt") == "instruction"
        && row.get("input").is_some_and(|v| !says_nothing(v))
    {
        return Err("input: the prompt of a pair is one text; write instruction and input into it".into());
    }
    // as a label, it may be the name of a class
    let text = |(key, value): (&String, &Value)| {
        let text =
            value.as_str().filter(|text| NULLS.contains(&text.trim()) && key != schema.name("label"))?;
        read(key).then(|| Note::Missing { key: key.clone(), text: text.into() })
    };
    notes.extend(row.iter().filter_map(text));
    for (key, value) in row.iter().filter(|(k, v)| !read(k) && !says_nothing(v)) {
        // values without effect in other trainers
        let plain = matches!((key.as_str(), value.as_f64()), ("weight", Some(1.0)) | ("margin", Some(0.0)));
        if let Some(why) = refused((schema, scores), key).filter(|_| !plain) {
            return Err(why);
        }
        notes.push(Note::RowKey { key: key.clone(), format: schema.format.word().into() });
    }
    Ok(())
}

/// Refuses message keys that select supervision in a form ft does not read. The error starts with the key.
///
/// # Errors
/// Such a key, or media.
pub(super) fn of_message(message: &Map<String, Value>) -> Result<(), String> {
    for (key, _) in message.iter().filter(|(_, v)| !says_nothing(v)) {
        let why = match key.as_str() {
            k if MEDIA.contains(&k) => format!("not built yet: {k} of a message"),
            k if SUPERVISION.contains(&k) => {
                "\"weight\": 0 or 1 says whether a message is supervised".to_string()
            }
            "function_call" => "write the call as tool_calls".to_string(),
            _ => continue,
        };
        return Err(format!(".{key}: {why}"));
    }
    Ok(())
}

/// As [`of_message`], for a part of the content, never supervised on its own.
///
/// # Errors
/// As [`of_message`]; a weight.
pub(super) fn of_part(part: &Map<String, Value>) -> Result<(), String> {
    match part.get("weight").filter(|v| !says_nothing(v)) {
        Some(_) => Err(".weight: a message is supervised as a whole, by its own weight".into()),
        None => of_message(part),
    }
}

/// A message as templates read it: the reasoning is also `reasoning_content`, and `thinking`, unless that has a value,
/// as in transformers 5.24 (`_alias_reasoning_fields`).
pub(crate) fn with_reasoning(message: &Value) -> Cow<'_, Value> {
    let given = |key: &&str| message.get(key).filter(|v| !v.is_null());
    let (Value::Object(map), Some(reasoning)) = (message, REASONING.iter().find_map(given)) else {
        return Cow::Borrowed(message);
    };
    let mut out = Map::new();
    out.insert("thinking".into(), reasoning.clone());
    let others = map.iter().filter(|(key, v)| !(v.is_null() && REASONING.contains(&key.as_str())));
    out.extend(others.map(|(key, v)| (key.clone(), v.clone())));
    out.insert("reasoning_content".into(), reasoning.clone());
    Cow::Owned(Value::Object(out))
}

/// Whether ft already checks the text of a message key, or the key only links messages.
pub(crate) fn is_message_key(role: &str, key: &str) -> bool {
    matches!(key, "role" | "content" | "tool_calls" | "tool_call_id")
        || REASONING.contains(&key)
        || (key == "name" && role != "user" && role != "assistant")
}
