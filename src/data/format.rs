//! The shapes of rows: what each format asks for, and a row as a sample.

use super::error::Error;
use super::template::is_reserved;
use crate::recipe::{self, Format, Mask};
use serde_json::{Map, Value};

/// The prompts that Alpaca's models were tuned with.
const ALPACA_INPUT: [&str; 3] = [
    "Below is an instruction that describes a task, paired with an input that provides further context. \
     Write a response that appropriately completes the request.\n\n### Instruction:\n",
    "\n\n### Input:\n",
    "\n\n### Response:\n",
];
const ALPACA: [&str; 2] = [
    "Below is an instruction that describes a task. \
     Write a response that appropriately completes the request.\n\n### Instruction:\n",
    "\n\n### Response:\n",
];

/// What is read from a row, before it is tokenized.
pub(super) enum Sample {
    /// A conversation, for the chat template.
    Chat {
        messages: Vec<Value>,
        tools: Option<Value>,
    },
    /// A text that the end-of-sequence token follows, supervised from a byte on.
    Text {
        text: String,
        from: usize,
    },
    Tokens {
        ids: Vec<u32>,
        labels: Vec<i32>,
    },
}

/// One source's format, its names of fields, and its mask.
pub(super) struct Shape {
    pub format: Format,
    pub mask: Mask,
    fields: std::collections::BTreeMap<String, String>,
}

impl Shape {
    /// The shape of a source; `mask` is `data.mask`.
    ///
    /// # Errors
    /// A mask that the format cannot do, and names that it does not have.
    pub fn new(source: &recipe::Source, mask: Option<Mask>) -> Result<Self, Error> {
        let (name, possible, names): (_, &[Mask], &[&str]) = match source.format {
            Format::Messages => (
                "messages",
                &[Mask::Assistant, Mask::None],
                &["messages", "conversations", "tools", "role", "content"],
            ),
            Format::Alpaca => {
                ("alpaca", &[Mask::Completion, Mask::None], &["instruction", "input", "output"])
            }
            Format::Completion => ("completion", &[Mask::Completion, Mask::None], &["prompt", "completion"]),
            Format::Text => ("text", &[Mask::None], &["text"]),
            Format::Tokens => ("tokens", &[Mask::None], &["input_ids", "labels"]),
        };
        let fail = |message| Err(Error::Recipe { place: source.place.clone(), message });
        let chosen = source.mask.or(mask).unwrap_or(possible[0]);
        if !possible.contains(&chosen) {
            let can = possible.iter().map(|m| format!("{:?}", word(*m))).collect::<Vec<_>>().join(" or ");
            return fail(format!(
                "format {name:?} cannot do mask = {:?}, only {can}; set mask in this source",
                word(chosen)
            ));
        }
        if let Some(unknown) = source.fields.keys().find(|k| !names.contains(&k.as_str())) {
            return fail(format!("format {name:?} has no field {unknown:?}; it has {}", names.join(", ")));
        }
        Ok(Self { format: source.format, mask: chosen, fields: source.fields.clone() })
    }

    fn name<'a>(&'a self, name: &'a str) -> &'a str {
        self.fields.get(name).map_or(name, String::as_str)
    }

    /// A row as a sample; the error says what is wrong with it, by the path inside it.
    pub fn sample(&self, row: Value) -> Result<Sample, String> {
        let Value::Object(mut row) = row else {
            return Err(format!("expected an object, found {}", kind(&row)));
        };
        match self.format {
            Format::Messages => self.chat(&mut row),
            Format::Alpaca => {
                let instruction = self.text(&row, "instruction", true)?;
                let input = match row.get(self.name("input")) {
                    None | Some(Value::Null) => "",
                    Some(_) => self.text(&row, "input", false)?,
                };
                let output = self.text(&row, "output", true)?;
                let prompt = if input.trim().is_empty() {
                    [ALPACA[0], instruction, ALPACA[1]].concat()
                } else {
                    [ALPACA_INPUT[0], instruction, ALPACA_INPUT[1], input, ALPACA_INPUT[2]].concat()
                };
                Ok(self.joined(prompt, output))
            }
            Format::Completion => {
                let prompt = self.text(&row, "prompt", false)?.to_string();
                Ok(self.joined(prompt, self.text(&row, "completion", true)?))
            }
            Format::Text => Ok(Sample::Text { text: self.text(&row, "text", true)?.to_string(), from: 0 }),
            Format::Tokens => {
                let ids = self.numbers(&row, "input_ids", 0)?;
                let labels = match row.get(self.name("labels")) {
                    None | Some(Value::Null) => ids.clone(),
                    Some(_) => self.numbers(&row, "labels", i64::from(super::UNSUPERVISED))?,
                };
                if ids.len() != labels.len() {
                    return Err(format!(
                        "{} has {} numbers and {} has {}; they must be as many",
                        self.name("input_ids"),
                        ids.len(),
                        self.name("labels"),
                        labels.len()
                    ));
                }
                if ids.is_empty() {
                    return Err(format!("{} is empty", self.name("input_ids")));
                }
                Ok(Sample::Tokens { ids: ids.into_iter().map(|i| i as u32).collect(), labels })
            }
        }
    }

    fn joined(&self, mut prompt: String, completion: &str) -> Sample {
        let from = if self.mask == Mask::None { 0 } else { prompt.len() };
        prompt.push_str(completion);
        Sample::Text { text: prompt, from }
    }

    fn text<'a>(&self, row: &'a Map<String, Value>, name: &str, needed: bool) -> Result<&'a str, String> {
        let name = self.name(name);
        match row.get(name) {
            None => Err(missing(name, row)),
            Some(Value::String(s)) if needed && s.trim().is_empty() => Err(format!("{name} is empty")),
            Some(Value::String(s)) => Ok(s),
            Some(other) => Err(format!("{name}: expected a string, found {}", kind(other))),
        }
    }

    fn numbers(&self, row: &Map<String, Value>, name: &str, least: i64) -> Result<Vec<i32>, String> {
        let name = self.name(name);
        let list = match row.get(name) {
            None => return Err(missing(name, row)),
            Some(Value::Array(list)) => list,
            Some(other) => {
                return Err(format!("{name}: expected an array of numbers, found {}", kind(other)));
            }
        };
        let unsupervised = i64::from(super::UNSUPERVISED);
        let number = |(i, v): (usize, &Value)| {
            let n = v.as_i64().and_then(|n| i32::try_from(n).ok());
            // between -100 and 0 there is nothing that a label may be
            n.filter(|n| i64::from(*n) >= 0 || (least < 0 && i64::from(*n) == unsupervised))
                .ok_or_else(|| format!("{name}[{i}]: {} is not a token id", brief(v)))
        };
        list.iter().enumerate().map(number).collect()
    }

    fn chat(&self, row: &mut Map<String, Value>) -> Result<Sample, String> {
        let (list, other) = (self.name("messages"), self.name("conversations"));
        let name = if row.get(list).is_none() && row.contains_key(other) { other } else { list };
        let messages = match row.get_mut(name) {
            None => return Err(missing(name, row)),
            Some(Value::Array(messages)) if messages.is_empty() => return Err(format!("{name} is empty")),
            Some(Value::Array(messages)) => std::mem::take(messages),
            Some(v) => return Err(format!("{name}: expected an array of messages, found {}", kind(v))),
        };
        let mut out: Vec<Value> = Vec::with_capacity(messages.len());
        for (i, message) in messages.into_iter().enumerate() {
            let message = self.message(message).map_err(|e| format!("{name}[{i}]{e}"))?;
            let role = |m: &Value| m["role"].as_str().unwrap_or_default().to_string();
            let now = role(&message);
            let before = out.last().map(role).unwrap_or_default();
            if is_tool(&now) && before != "assistant" && !is_tool(&before) {
                return Err(format!(
                    "{name}[{i}]: a {now:?} message answers an assistant's, and none is before it"
                ));
            }
            out.push(message);
        }
        let roles = || out.iter().filter_map(|m| m["role"].as_str());
        if self.mask == Mask::Assistant && !roles().any(|r| r == "assistant") {
            return Err(format!("{name}: no message of an assistant, so nothing to supervise"));
        }
        let tools = self.tools(row)?;
        if out.iter().chain(&tools).any(holds_reserved) {
            return Err(format!("{name}: a noncharacter (U+FDD0 to U+FDEF) in the text"));
        }
        Ok(Sample::Chat { messages: out, tools })
    }

    /// One message with the keys that templates read; the error begins with the path inside the message.
    fn message(&self, message: Value) -> Result<Value, String> {
        let Value::Object(mut message) = message else {
            return Err(format!(": expected an object, found {}", kind(&message)));
        };
        let share = !message.contains_key(self.name("role")) && message.contains_key("from");
        let (role_key, content_key) =
            if share { ("from", "value") } else { (self.name("role"), self.name("content")) };
        let role = match message.get(role_key) {
            None => return Err(format!(": {}", missing(role_key, &message))),
            Some(Value::String(role)) => role_of(role).ok_or_else(|| {
                format!(".{role_key}: unknown role \"{}\"", brief(&Value::from(role.as_str())))
            })?,
            Some(other) => return Err(format!(".{role_key}: expected a string, found {}", kind(other))),
        };
        let has_content = message.contains_key(content_key);
        let content = match message.get(content_key) {
            None | Some(Value::Null) => None,
            Some(Value::String(s)) => Some(s.clone()),
            Some(Value::Array(parts)) => Some(joined_parts(parts).map_err(|e| format!(".{content_key}{e}"))?),
            Some(other) => return Err(format!(".{content_key}: expected a string, found {}", kind(other))),
        };
        // Tables of mixed rows are full of nulls for keys that a message does not have.
        message.retain(|_, v| !v.is_null());
        let says_otherwise = ["tool_calls", "reasoning_content"].iter().any(|k| {
            message.get(*k).is_some_and(|v| match v {
                Value::Array(a) => !a.is_empty(),
                Value::String(s) => !s.is_empty(),
                _ => false,
            })
        });
        if let Some(calls) = message.get("tool_calls") {
            check_calls(calls)?;
        }
        let empty = content.as_ref().is_none_or(|c| c.trim().is_empty());
        let state = match (&content, has_content) {
            (Some(_), _) => "is empty",
            (None, true) => "is null",
            (None, false) => "is missing",
        };
        match role {
            "assistant" if empty && !says_otherwise => {
                return Err(format!(".{content_key} {state}, and there are no tool_calls"));
            }
            "user" if empty => return Err(format!(".{content_key} {state}")),
            _ if content.is_none() && role != "assistant" => return Err(format!(".{content_key} {state}")),
            _ => {}
        }
        message.shift_remove(role_key);
        message.shift_remove(content_key);
        let mut out = Map::new();
        out.insert("role".into(), role.into());
        out.insert("content".into(), content.unwrap_or_default().into());
        out.extend(message);
        Ok(Value::Object(out))
    }

    fn tools(&self, row: &mut Map<String, Value>) -> Result<Option<Value>, String> {
        let name = self.name("tools").to_string();
        let tools = match row.shift_remove(&name) {
            // datasets of rows with one schema each store them as text
            Some(Value::String(s)) if s.trim().is_empty() => None,
            Some(Value::String(s)) => {
                Some(serde_json::from_str(&s).map_err(|e| format!("{name}: not JSON: {e}"))?)
            }
            other => other,
        };
        match tools {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Array(list)) if list.is_empty() => Ok(None),
            Some(Value::Array(list)) => match list.iter().position(|t| !t.is_object()) {
                Some(i) => Err(format!("{name}[{i}]: expected an object, found {}", kind(&list[i]))),
                None => Ok(Some(Value::Array(list))),
            },
            Some(other) => Err(format!("{name}: expected an array, found {}", kind(&other))),
        }
    }
}

fn check_calls(calls: &Value) -> Result<(), String> {
    let Value::Array(list) = calls else {
        return Err(format!(".tool_calls: expected an array, found {}", kind(calls)));
    };
    for (i, call) in list.iter().enumerate() {
        let function = call.get("function").unwrap_or(call);
        if !function.get("name").is_some_and(Value::is_string) {
            return Err(format!(".tool_calls[{i}]: the call has no name"));
        }
    }
    Ok(())
}

/// The roles that templates know, ShareGPT's names mapped to them.
fn role_of(name: &str) -> Option<&'static str> {
    Some(match name {
        "system" => "system",
        "developer" => "developer",
        "user" | "human" => "user",
        "assistant" | "gpt" | "chatgpt" | "model" => "assistant",
        "tool" | "function" | "observation" | "function_response" => "tool",
        "tool_results" => "tool_results",
        "ipython" => "ipython",
        _ => return None,
    })
}

fn is_tool(role: &str) -> bool {
    matches!(role, "tool" | "tool_results" | "ipython")
}

fn joined_parts(parts: &[Value]) -> Result<String, String> {
    let mut out = String::new();
    for (i, part) in parts.iter().enumerate() {
        match (part.get("type").and_then(Value::as_str), part.get("text")) {
            (Some("text") | None, Some(Value::String(text))) => out.push_str(text),
            (Some(other), _) if other != "text" => {
                return Err(format!("[{i}]: not built yet: content of type {other:?}"));
            }
            _ => return Err(format!("[{i}]: expected {{\"type\": \"text\", \"text\": ...}}")),
        }
    }
    Ok(out)
}

fn holds_reserved(value: &Value) -> bool {
    match value {
        Value::String(s) => s.contains(is_reserved),
        Value::Array(list) => list.iter().any(holds_reserved),
        Value::Object(map) => map.iter().any(|(k, v)| k.contains(is_reserved) || holds_reserved(v)),
        _ => false,
    }
}

fn word(mask: Mask) -> &'static str {
    match mask {
        Mask::Assistant => "assistant",
        Mask::Completion => "completion",
        Mask::None => "none",
    }
}

fn missing(name: &str, row: &Map<String, Value>) -> String {
    if row.is_empty() {
        return format!("no field {name:?}; the object is empty");
    }
    let mut there: Vec<String> = row.keys().take(8).map(|k| brief(&Value::from(k.as_str()))).collect();
    if row.len() > there.len() {
        there.push("...".into());
    }
    format!("no field {name:?}; there is {}", there.join(", "))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A value for a message: at most 40 characters of it, control characters spelled.
fn brief(value: &Value) -> String {
    let text = match value {
        Value::String(s) => s.clone(),
        Value::Array(_) | Value::Object(_) => kind(value).to_string(),
        other => other.to_string(),
    };
    let short: String = text.chars().take(40).flat_map(char::escape_debug).collect();
    if text.chars().nth(40).is_some() { short + "..." } else { short }
}
