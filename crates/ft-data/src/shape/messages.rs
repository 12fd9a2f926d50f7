//! Lists of messages as conversations.

use super::keys::{self, REASONING};
use super::schema::Schema;
use super::values::is_reserved;
use super::values::{brief, kind, missing};
use ft_base::store::json;
use ft_recipe::{Format, Mask};
use serde_json::{Map, Value, json};

/// Role of an assistant's message that holds calls of tools as JSON, in ShareGPT's format.
const CALL: &str = "function_call";

/// A conversation in the form read by chat templates.
#[derive(Default)]
pub(crate) struct Chat {
    pub messages: Vec<Value>,
    pub tools: Option<Value>,
    /// Indices of assistant messages excluded from the loss, by the row or the mask.
    pub unsupervised: Vec<usize>,
    /// Places of the messages in the row: `messages[0]`, `prompt`.
    names: Vec<String>,
}

impl Chat {
    /// The name of message `i` in the row, for error messages.
    pub fn name(&self, i: usize) -> String {
        self.names.get(i).cloned().unwrap_or_default()
    }

    /// The role of message `i`.
    pub fn role(&self, i: usize) -> &str {
        self.messages.get(i).and_then(|m| m["role"].as_str()).unwrap_or_default()
    }

    /// Appends a message of text, found under `name` in the row.
    pub(super) fn push(&mut self, role: &str, text: &str, name: String) {
        self.messages.push(json!({"role": role, "content": text}));
        self.names.push(name);
    }

    /// Whether message `i` is the assistant's.
    pub(super) fn is_answer(&self, i: usize) -> bool {
        self.role(i) == "assistant"
    }
}

impl Schema {
    /// Converts a row of messages to a conversation. Errors start with the path inside the row.
    pub(crate) fn chat(&self, row: &mut Map<String, Value>) -> Result<Chat, String> {
        let name = self.list_of(row).to_string();
        let mut chat = Chat::default();
        match row.get_mut(&name).map(Value::take) {
            None => return Err(missing(&name, row)),
            Some(list) => self.add(&mut chat, &name, list)?,
        }
        let last = (0..chat.messages.len()).rfind(|i| chat.is_answer(*i));
        if self.mask != Mask::None && last.is_none() {
            return Err(format!("{name}: no message of an assistant, so nothing to supervise"));
        }
        if let Some(last) = last.filter(|_| self.mask == Mask::Last) {
            let taken_out = chat.unsupervised.contains(&last).then_some(last);
            chat.unsupervised = (0..last).filter(|i| chat.is_answer(*i)).chain(taken_out).collect();
        }
        self.finished(chat, row)
    }

    /// Appends a row's list of messages, or the same as a string of JSON. Errors start with the path inside
    /// the row.
    pub(super) fn add(&self, chat: &mut Chat, name: &str, list: Value) -> Result<(), String> {
        let messages = match opened(list, name)? {
            Value::Array(messages) if messages.is_empty() => return Err(format!("{name} is empty")),
            Value::Array(messages) => messages,
            v => return Err(format!("{name}: expected an array of messages, found {}", kind(&v))),
        };
        for (i, message) in messages.into_iter().enumerate() {
            let (message, supervised) = self.message(message).map_err(|e| format!("{name}[{i}]{e}"))?;
            let now = message["role"].as_str().unwrap_or_default();
            let before = chat.messages.last().and_then(|m| m["role"].as_str()).unwrap_or_default();
            if is_tool(now) && before != "assistant" && !is_tool(before) {
                return Err(format!(
                    "{name}[{i}]: a {now:?} message answers an assistant's, and none is before it"
                ));
            }
            if !supervised {
                chat.unsupervised.push(chat.messages.len());
            }
            chat.messages.push(message);
            chat.names.push(format!("{name}[{i}]"));
        }
        Ok(())
    }

    /// Replaces texts that are lists of messages as JSON by these lists, in keys for either.
    pub(super) fn open_lists(&self, row: &mut Map<String, Value>) {
        let keys = self.format.keys(self.chat);
        let either = ["prompt", "completion", "chosen", "rejected"].into_iter().filter(|k| keys.contains(k));
        let rated = ["messages", "conversations", "conversation"].into_iter();
        for name in either.chain(rated.filter(|_| self.format == Format::Unpaired)) {
            if let Some(value) = row.get_mut(self.name(name))
                && let Some(list) = value.as_str().and_then(|text| self.list_in(text))
            {
                *value = list;
            }
        }
    }

    /// The list in a text, if it is one of objects with a role, as JSON.
    fn list_in(&self, text: &str) -> Option<Value> {
        // most texts are not parsed
        text.trim_start().strip_prefix('[').filter(|rest| rest.trim_start().starts_with('{'))?;
        let list = json::value(text.as_bytes()).ok()?;
        let is_message = |m: &Value| m.get(self.name("role")).or(m.get("from")).is_some_and(Value::is_string);
        let all = list.as_array()?.iter().all(is_message);
        all.then_some(list)
    }

    /// Adds the row's system text and tools to its messages.
    pub(super) fn finished(&self, mut chat: Chat, row: &mut Map<String, Value>) -> Result<Chat, String> {
        if let (Mask::None, Some(first)) = (self.mask, chat.unsupervised.first()) {
            return Err(format!(
                "{}.weight: 0 takes a message out of the loss, and mask = \"none\" supervises all",
                chat.name(*first)
            ));
        }
        self.system(row, &mut chat)?;
        chat.tools = self.tools(row)?;
        let reserved = |m: &Value| holds_reserved(m);
        if let Some(i) = chat.messages.iter().position(reserved) {
            return Err(format!("{}: a noncharacter (U+FDD0 to U+FDEF) in the text", chat.name(i)));
        }
        if chat.tools.as_ref().is_some_and(reserved) {
            let name = self.name("tools");
            return Err(format!("{name}: a noncharacter (U+FDD0 to U+FDEF) in the text"));
        }
        Ok(chat)
    }

    /// Prepends the row's `system` text as a message.
    fn system(&self, row: &Map<String, Value>, chat: &mut Chat) -> Result<(), String> {
        let name = self.name("system");
        let text = match row.get(name) {
            None | Some(Value::Null) => return Ok(()),
            Some(Value::String(text)) if text.trim().is_empty() => return Ok(()),
            Some(Value::String(text)) => text,
            Some(other) => return Err(format!("{name}: expected a string, found {}", kind(other))),
        };
        if matches!(chat.role(0), "system" | "developer") {
            if chat.messages[0]["content"].as_str().map(str::trim) == Some(text.trim()) {
                return Ok(());
            }
            return Err(format!("{name}: the row has one, and another in {}", chat.name(0)));
        }
        chat.messages.insert(0, json!({"role": "system", "content": text}));
        chat.names.insert(0, name.to_string());
        chat.unsupervised.iter_mut().for_each(|i| *i += 1);
        Ok(())
    }

    /// Normalizes one message to the keys read by templates; also returns whether the message is
    /// supervised. Errors start with the path inside the message.
    fn message(&self, message: Value) -> Result<(Value, bool), String> {
        let Value::Object(mut message) = message else {
            return Err(format!(": expected an object, found {}", kind(&message)));
        };
        let share = !message.contains_key(self.name("role")) && message.contains_key("from");
        let (role_key, content_key) =
            if share { ("from", "value") } else { (self.name("role"), self.name("content")) };
        let role = role_in(&message, role_key)?;
        let has_content = message.contains_key(content_key);
        let mut content = content_in(&message, content_key)?;
        if message.get(role_key).is_some_and(|r| r == CALL)
            && let Some(text) = content.take()
        {
            let calls = calls_in(&text).map_err(|e| format!(".{content_key}: {e}"))?;
            message.insert("tool_calls".into(), calls);
        }
        // Tables with mixed rows contain nulls for absent keys.
        message.retain(|_, v| !v.is_null());
        keys::of_message(&message)?;
        if let Some((key, other)) =
            message.iter().find(|(k, v)| REASONING.contains(&k.as_str()) && !v.is_string())
        {
            return Err(format!(".{key}: expected a string, found {}", kind(other)));
        }
        let supervised = weight(message.shift_remove("weight"), role)?;
        let calls = message.get("tool_calls").and_then(Value::as_array).is_some_and(|a| !a.is_empty());
        let thinks =
            REASONING.iter().any(|k| message.get(*k).and_then(Value::as_str).is_some_and(|s| !s.is_empty()));
        if let Some(calls) = message.get_mut("tool_calls") {
            open_calls(calls, role)?;
        }
        // an empty text is a text; templates write the turn
        if content.is_none() && !(role == "assistant" && (calls || thinks)) {
            let state = if has_content { "is null" } else { "is missing" };
            let more = if role == "assistant" { ", and there are no tool_calls" } else { "" };
            return Err(format!(".{content_key} {state}{more}"));
        }
        message.shift_remove(role_key);
        message.shift_remove(content_key);
        let mut out = Map::new();
        out.insert("role".into(), role.into());
        out.insert("content".into(), content.unwrap_or_default().into());
        for (key, value) in message {
            // with from/value as role and content, separate role and content keys are ignored
            if !out.contains_key(&key) {
                out.insert(key, value);
            }
        }
        Ok((Value::Object(out), supervised))
    }

    fn tools(&self, row: &mut Map<String, Value>) -> Result<Option<Value>, String> {
        let name = self.name("tools").to_string();
        let tools = row.shift_remove(&name).map(|tools| opened(tools, &name)).transpose()?;
        match tools {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Array(list)) if list.is_empty() => Ok(None),
            Some(Value::Array(list)) => {
                for (i, tool) in list.iter().enumerate() {
                    if !tool.is_object() {
                        return Err(format!("{name}[{i}]: expected an object, found {}", kind(tool)));
                    }
                    exact(tool).map_err(|e| format!("{name}[{i}]{e}"))?;
                }
                Ok(Some(Value::Array(list)))
            }
            Some(other) => Err(format!("{name}: expected an array, found {}", kind(&other))),
        }
    }
}

/// Parses a value given as a string of JSON, as in datasets with a fixed schema; a blank string is null.
fn opened(value: Value, name: &str) -> Result<Value, String> {
    match value {
        Value::String(s) if s.trim().is_empty() => Ok(Value::Null),
        Value::String(s) => json::value(s.as_bytes())
            .map_err(|e| format!("{name}: {}", json::describe(&e, "a string that is not JSON"))),
        other => Ok(other),
    }
}

/// The calls of a message of role [`CALL`]: one or a list, as JSON.
fn calls_in(text: &str) -> Result<Value, String> {
    let not_json = "expected a call as JSON, with name and arguments";
    let calls = match json::value(text.as_bytes()).map_err(|e| json::describe(&e, not_json))? {
        Value::Array(list) if list.is_empty() => return Err("the list of calls is empty".into()),
        Value::Array(list) => list,
        call => vec![call],
    };
    Ok(calls.into_iter().map(|call| json!({"type": "function", "function": call})).collect())
}

fn role_in(message: &Map<String, Value>, key: &str) -> Result<&'static str, String> {
    match message.get(key) {
        None => Err(format!(": {}", missing(key, message))),
        Some(role @ Value::String(name)) => {
            role_of(name).ok_or_else(|| format!(".{key}: unknown role \"{}\"", brief(role)))
        }
        Some(other) => Err(format!(".{key}: expected a string, found {}", kind(other))),
    }
}

/// The text of a message; `None` if null or missing.
fn content_in(message: &Map<String, Value>, key: &str) -> Result<Option<String>, String> {
    match message.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(parts)) => joined_parts(parts).map(Some).map_err(|e| format!(".{key}{e}")),
        Some(other) => Err(format!(".{key}: expected a string, found {}", kind(other))),
    }
}

/// Whether a message is supervised, by the `weight` (0 or 1) of OpenAI's fine-tuning format.
fn weight(value: Option<Value>, role: &str) -> Result<bool, String> {
    match value.as_ref().map(|v| (v, v.as_f64())) {
        None => Ok(true),
        Some((_, Some(0.0))) => Ok(role != "assistant"),
        Some((_, Some(1.0))) if role == "assistant" => Ok(true),
        Some((_, Some(1.0))) => {
            Err(format!(".weight: 1 on a {role:?} message, but only the assistant's are supervised"))
        }
        Some((v, _)) => Err(format!(".weight: {} is neither 0 nor 1", brief(v))),
    }
}

/// Validates the tool calls of a message of `role`, and parses arguments given as a JSON string (as in OpenAI's API).
/// Inference servers also parse them before rendering, and refuse invalid JSON.
///
/// # Errors
/// Calls of another than the assistant; a call without a name, or arguments that are no object; begins with the path
/// inside the message.
pub fn open_calls(calls: &mut Value, role: &str) -> Result<(), String> {
    let Value::Array(list) = calls else {
        return Err(format!(".tool_calls: expected an array, found {}", kind(calls)));
    };
    if !list.is_empty() && role != "assistant" {
        return Err(format!(".tool_calls: a {role:?} message calls no tools"));
    }
    for (i, call) in list.iter_mut().enumerate() {
        let at = format!(".tool_calls[{i}]");
        let flat = call.get("function").is_none();
        let (function, at) = match call.get_mut("function") {
            Some(function) => (function, format!("{at}.function")),
            None => (call, at),
        };
        let named = function.get("name").and_then(Value::as_str).is_some_and(|n| !n.trim().is_empty());
        let (Value::Object(function), true) = (function, named) else {
            let at = at.strip_suffix(".function").filter(|_| !flat).unwrap_or(&at);
            return Err(format!("{at}: the call has no name"));
        };
        let arguments = function.entry("arguments").or_insert(Value::Null);
        let opened = match arguments {
            Value::Null => Value::Object(Map::new()),
            Value::String(s) if s.trim().is_empty() => Value::Object(Map::new()),
            Value::String(s) => json::value(s.as_bytes()).map_err(|e| {
                format!("{at}.arguments: {}", json::describe(&e, "a string that is not JSON"))
            })?,
            _ => arguments.take(),
        };
        if !opened.is_object() {
            return Err(format!(
                "{at}.arguments: expected an object, or a string that holds one, found {}",
                kind(&opened)
            ));
        }
        exact(&opened).map_err(|e| format!("{at}.arguments{e}"))?;
        *arguments = opened;
    }
    Ok(())
}

/// Refuses an integer beyond 64 bits, which the parser has rounded to a float.
fn exact(value: &Value) -> Result<(), String> {
    match value {
        Value::Number(n) => {
            match n.as_f64().filter(|x| n.is_f64() && x.fract() == 0.0 && x.abs() >= 9.2e18) {
                Some(x) => Err(format!(": {x:e} has more digits than ft keeps; write it as a string")),
                None => Ok(()),
            }
        }
        Value::Array(list) => list.iter().try_for_each(exact),
        Value::Object(map) => map.values().try_for_each(exact),
        _ => Ok(()),
    }
}

/// Maps a role to a role known to templates, including the names used by ShareGPT.
fn role_of(name: &str) -> Option<&'static str> {
    Some(match name {
        "system" => "system",
        "developer" => "developer",
        "user" | "human" => "user",
        "assistant" | "gpt" | "chatgpt" | "model" | CALL => "assistant",
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
            (Some("text") | None, Some(Value::String(text))) => {
                part.as_object().map_or(Ok(()), keys::of_part).map_err(|e| format!("[{i}]{e}"))?;
                out.push_str(text);
            }
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
