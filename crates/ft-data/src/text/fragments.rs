//! Strings of a conversation required in the rendered text.

use super::marks::{MarkPosition, field};
use crate::shape::{keys::REASONING, messages::Chat};
use serde_json::Value;
use std::ops::Range;

/// Delimiters after the reasoning in assistant text.
const CLOSING: &[&str] = &[
    "</think>",
    "</thinking>",
    "</thought>",
    "</reasoning>",
    "</seed:think>",
    "[/THINK]",
    "◁/think▷",
    "<|END_THINKING|>",
];
/// Last bytes of the delimiters.
const LAST_BYTES: &[u8] = b">]\xB7";

/// A string of the conversation required in the text.
pub(super) struct Fragment {
    /// Index of the message; `None` for the tool list.
    pub message: Option<usize>,
    /// End of the string.
    pub position: MarkPosition,
    /// Start offset in the field.
    pub start: usize,
    pub kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// Message content other than reasoning.
    Content,
    Reasoning,
    Call,
    Tool,
}

impl Fragment {
    /// The text of the fragment.
    pub fn of<'a>(&self, chat: &'a Chat) -> &'a str {
        let value = match self.message {
            Some(i) => chat.messages.get(i),
            None => chat.tools.as_ref(),
        };
        let text = value.and_then(|v| field(v, &self.position.pointer)).and_then(Value::as_str);
        text.and_then(|f| f.get(self.start..self.position.at)).unwrap_or_default()
    }

    /// Path of the fragment inside the row.
    pub fn path(&self, chat: &Chat) -> String {
        let list = self.message.map_or("tools".to_string(), |i| chat.name(i));
        list + &path(&self.position.pointer)
    }
}

/// Converts a JSON pointer to a path: `/tool_calls/0/function` to `.tool_calls[0].function`.
pub(super) fn path(pointer: &str) -> String {
    let mut out = String::new();
    for part in pointer.split('/').skip(1) {
        match part.parse::<usize>() {
            Ok(i) => out += &format!("[{i}]"),
            Err(_) => out += &format!(".{}", part.replace("~1", "/").replace("~0", "~").escape_debug()),
        }
    }
    out
}

/// The strings of a conversation required in the text, in order of the messages; those of the tools last.
pub(super) fn fragments(chat: &Chat) -> Vec<Fragment> {
    let mut out = Vec::new();
    let mut add = |message: Option<usize>, pointer: &str, text: &str, range: Range<usize>, kind: Kind| {
        let cut = &text[range.clone()];
        if !cut.trim().is_empty() {
            let start = range.end - cut.trim_start().len();
            let position = MarkPosition { pointer: pointer.into(), at: range.start + cut.trim_end().len() };
            out.push(Fragment { message, position, start, kind });
        }
    };
    for (i, message) in chat.messages.iter().enumerate() {
        let content = message["content"].as_str().unwrap_or_default();
        match thoughts(content).filter(|_| chat.role(i) == "assistant") {
            None => add(Some(i), "/content", content, 0..content.len(), Kind::Content),
            Some((thoughts, answer)) => {
                add(Some(i), "/content", content, thoughts, Kind::Reasoning);
                add(Some(i), "/content", content, answer..content.len(), Kind::Content);
            }
        }
        // every message has role and content, most have no other keys
        if message.as_object().is_some_and(|m| m.len() <= 2) {
            continue;
        }
        for key in REASONING {
            if let Some(text) = message.get(*key).and_then(Value::as_str) {
                add(Some(i), &format!("/{key}"), text, 0..text.len(), Kind::Reasoning);
            }
        }
        visit_calls(message, &mut |pointer, value| {
            if let Value::String(text) = value {
                add(Some(i), pointer, text, 0..text.len(), Kind::Call);
            }
        });
    }
    for (i, tool) in chat.tools.iter().flat_map(|t| t.as_array()).flatten().enumerate() {
        let name = |p: &&str| tool.pointer(p).and_then(Value::as_str).is_some_and(|n| !n.trim().is_empty());
        let part = ["/function/name", "/name"].into_iter().find(name).unwrap_or_default();
        // the name if there is one, else all strings
        walk(tool.pointer(part).unwrap_or(tool), format!("/{i}{part}"), &mut |pointer, value| {
            if let Value::String(text) = value {
                add(None, pointer, text, 0..text.len(), Kind::Tool);
            }
        });
    }
    out
}

/// The byte range of the reasoning in assistant text, and the start of the answer.
fn thoughts(content: &str) -> Option<(Range<usize>, usize)> {
    if !content.bytes().any(|b| LAST_BYTES.contains(&b)) {
        return None;
    }
    let (end, closing) = CLOSING.iter().filter_map(|c| Some((content.rfind(c)?, *c))).max()?;
    let opening = closing.replacen(['/'], "", 1).replace("END", "START");
    let head = &content[..end];
    let from = if head.trim_start().starts_with(&opening) {
        head.len() - head.trim_start().len() + opening.len()
    } else {
        0
    };
    Some((from..end, end + closing.len()))
}

/// Visits the contents of a message's calls, except ids and types.
pub(super) fn visit_calls<'a>(message: &'a Value, found: &mut dyn FnMut(&str, &'a Value)) {
    for (k, call) in message.get("tool_calls").and_then(Value::as_array).into_iter().flatten().enumerate() {
        for (key, value) in call.as_object().into_iter().flatten() {
            if !matches!(key.as_str(), "id" | "type" | "index") {
                walk(value, format!("/tool_calls/{k}/{}", step(key)), found);
            }
        }
    }
}

fn walk<'a>(value: &'a Value, at: String, found: &mut dyn FnMut(&str, &'a Value)) {
    match value {
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, v)| walk(v, format!("{at}/{i}"), found));
        }
        Value::Object(map) => map.iter().for_each(|(k, v)| walk(v, format!("{at}/{}", step(k)), found)),
        leaf => found(&at, leaf),
    }
}

/// A key as a step of a JSON pointer.
pub(super) fn step(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}
