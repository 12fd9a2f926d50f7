//! Checks rendered text for completeness: every string of the conversation must appear in the text.
//!
//! Templates drop content: unknown roles, calls, tools, text next to a call. A row with dropped content
//! would train something the author did not write, so it is refused. The check renders the row with an
//! invisible mark after every string. In the text, the string must precede the mark, verbatim or
//! JSON-escaped; leading and trailing white space may differ. Other occurrences of the same characters do
//! not count.
//!
//! Two kinds of dropped content are legitimate, and are reported instead of refused:
//!
//! - Reasoning of the assistant (`reasoning_content`, or text before `</think>`): reasoning models read
//!   earlier turns without it, and some templates never render it.
//! - A system message, or assistant text next to a call, if rendered in a shorter conversation: Mistral's
//!   template renders the system message only if the last message is from the user.
//!
//! Names and ids that link messages (`tool_call_id`, the `id` of a call) do not count as text.

use super::json::escaped;
use super::marks::{Rendered, Spot, field, jinja, mark, with_marks};
use super::messages::Chat;
use super::notes::Note;
use super::row_keys::{REASONING, is_message_key, says_nothing};
use super::spans::{Marked, Render};
use minijinja::Value as Jinja;
use serde_json::Value;
use std::collections::BTreeSet;

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
/// Maximum number of shorter conversations to render.
const SHORTER: usize = 4;

/// A string of the conversation required in the text.
pub(super) struct Piece {
    /// Index of the message; `None` for the tool list.
    pub message: Option<usize>,
    /// End of the string.
    pub spot: Spot,
    /// Start offset in the field.
    start: usize,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Content,
    Reasoning,
    Call,
    Tool,
}

impl Piece {
    /// Whether this is message content other than reasoning.
    pub fn is_content(&self) -> bool {
        self.kind == Kind::Content
    }

    /// The text of the piece.
    pub fn of<'a>(&self, chat: &'a Chat) -> &'a str {
        let value = match self.message {
            Some(i) => chat.messages.get(i),
            None => chat.tools.as_ref(),
        };
        let text = value.and_then(|v| field(v, &self.spot.pointer)).and_then(Value::as_str);
        text.and_then(|f| f.get(self.start..self.spot.at)).unwrap_or_default()
    }

    /// Path of the piece inside the row.
    fn path(&self, chat: &Chat) -> String {
        let list = self.message.map_or("tools".to_string(), |i| chat.name(i));
        list + &path(&self.spot.pointer)
    }
}

/// Converts a JSON pointer to a path: `/tool_calls/0/function` to `.tool_calls[0].function`.
fn path(pointer: &str) -> String {
    let mut out = String::new();
    for part in pointer.split('/').skip(1) {
        match part.parse::<usize>() {
            Ok(i) => out += &format!("[{i}]"),
            Err(_) => out += &format!(".{}", part.replace("~1", "/").replace("~0", "~").escape_debug()),
        }
    }
    out
}

/// The strings of a conversation required in the text.
pub(super) fn pieces(chat: &Chat) -> Vec<Piece> {
    let mut out = Vec::new();
    for (i, message) in chat.messages.iter().enumerate() {
        let mut add = |pointer: String, text: &str, from: usize, to: usize, kind: Kind| {
            let cut = &text[from..to];
            if !cut.trim().is_empty() {
                let start = to - cut.trim_start().len();
                let spot = Spot { pointer, at: from + cut.trim_end().len() };
                out.push(Piece { message: Some(i), spot, start, kind });
            }
        };
        let content = message["content"].as_str().unwrap_or_default();
        match thoughts(content).filter(|_| chat.role(i) == "assistant") {
            None => add("/content".into(), content, 0, content.len(), Kind::Content),
            Some((from, to, answer)) => {
                add("/content".into(), content, from, to, Kind::Reasoning);
                add("/content".into(), content, answer, content.len(), Kind::Content);
            }
        }
        // every message has role and content, most have no other keys
        if message.as_object().is_some_and(|m| m.len() <= 2) {
            continue;
        }
        for key in REASONING {
            if let Some(text) = message.get(*key).and_then(Value::as_str) {
                add(format!("/{key}"), text, 0, text.len(), Kind::Reasoning);
            }
        }
        leaves(message, &mut |pointer, value| {
            if let Value::String(text) = value {
                add(pointer.into(), text, 0, text.len(), Kind::Call);
            }
        });
    }
    for (i, tool) in chat.tools.iter().flat_map(|t| t.as_array()).flatten().enumerate() {
        let named = ["/function/name", "/name"]
            .into_iter()
            .find(|p| tool.pointer(p).and_then(Value::as_str).is_some_and(|n| !n.trim().is_empty()));
        let mut add = |pointer: &str, text: &str| {
            let (start, at) = (text.len() - text.trim_start().len(), text.trim_end().len());
            if start < at {
                let spot = Spot { pointer: format!("/{i}{pointer}"), at };
                out.push(Piece { message: None, spot, start, kind: Kind::Tool });
            }
        };
        match named {
            Some(pointer) => add(pointer, tool.pointer(pointer).and_then(Value::as_str).unwrap_or_default()),
            None => walk(tool, String::new(), &mut |pointer, value| {
                if let Value::String(text) = value {
                    add(pointer, text);
                }
            }),
        }
    }
    out
}

/// Offsets of the reasoning in assistant text: start, end, start of the answer.
fn thoughts(content: &str) -> Option<(usize, usize, usize)> {
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
    Some((from, end, end + closing.len()))
}

/// Visits the contents of a message's calls, except ids and types.
fn leaves<'a>(message: &'a Value, found: &mut dyn FnMut(&str, &'a Value)) {
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

fn step(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// Whether `text` around offset `at` equals `before` and `behind`, verbatim or JSON-escaped.
fn stands(text: &str, at: usize, before: &str, behind: &str) -> bool {
    let (head, tail) = text.split_at(at);
    (head.ends_with(before) && tail.starts_with(behind))
        || [false, true]
            .into_iter()
            .any(|ascii| head.ends_with(&escaped(before, ascii)) && tail.starts_with(&escaped(behind, ascii)))
}

/// A conversation, the rendered text, and the renderer.
pub(super) struct Gate<'a> {
    pub chat: &'a Chat,
    pub text: &'a str,
    pub plain: &'a [Jinja],
    pub tools: &'a Jinja,
    pub render: &'a Render<'a>,
}

impl Gate<'_> {
    /// Checks the text against the conversation. `marked` is the rendering with a mark at the end of every
    /// piece, if marks leave the text unchanged.
    ///
    /// # Errors
    /// Missing content, by path.
    pub fn check(
        &self,
        pieces: &[Piece],
        marked: Option<&Marked>,
        notes: &mut Vec<Note>,
    ) -> Result<(), String> {
        for (id, piece) in pieces.iter().enumerate() {
            let whole = piece.of(self.chat);
            let there = match marked {
                Some(m) => m.whole.all(id).any(|at| stands(self.text, at, whole, "")),
                None => self.found_alone(piece, whole),
            };
            if !there {
                let says_more =
                    pieces.iter().any(|p| p.message == piece.message && p.kind != Kind::Reasoning);
                self.lacks(piece, says_more, notes)?;
            }
        }
        self.numbers()?;
        self.other_keys(notes);
        Ok(())
    }

    /// Checks one piece if marks in all pieces change the text: with a single mark, at the end or in the
    /// middle. If these also change the text, requires the text to contain the piece and to change with it.
    fn found_alone(&self, piece: &Piece, whole: &str) -> bool {
        let mut middle = whole.len() / 2;
        while !whole.is_char_boundary(middle) {
            middle -= 1;
        }
        for at in [whole.len(), middle] {
            let spot = Spot { pointer: piece.spot.pointer.clone(), at: piece.start + at };
            let seen = self.with(piece.message, &|v| with_marks(v, std::iter::once((0, &spot))));
            if let Some(seen) = seen.filter(|s| s.text == self.text) {
                return seen.all(0).any(|p| stands(self.text, p, &whole[..at], &whole[at..]));
            }
        }
        let other = |v: &Value| {
            let mut v = v.clone();
            if let Some(Value::String(field)) = v.pointer_mut(&piece.spot.pointer) {
                field.insert(piece.spot.at, 'q');
            }
            v
        };
        let holds = self.text.contains(whole)
            || [false, true].into_iter().any(|ascii| self.text.contains(&escaped(whole, ascii)));
        holds && self.with(piece.message, &other).is_none_or(|seen| seen.text != self.text)
    }

    /// Renders the conversation with a modified message or tool list; `None` if the template raises an
    /// error.
    fn with(&self, message: Option<usize>, other: &dyn Fn(&Value) -> Value) -> Option<Rendered> {
        let mut messages = self.plain.to_vec();
        let mut tools = self.tools.clone();
        match message {
            Some(i) => messages[i] = jinja(&other(&self.chat.messages[i])),
            None => tools = self.chat.tools.as_ref().map_or(tools, |t| jinja(&other(t))),
        }
        Some(Rendered::new(&(self.render)(&messages, &tools, false, true).ok()?))
    }

    /// Handles a missing piece: adds a note or returns an error. `says_more` means the message contains
    /// more than reasoning; otherwise dropping the reasoning would empty the message.
    fn lacks(&self, piece: &Piece, says_more: bool, notes: &mut Vec<Note>) -> Result<(), String> {
        let path = piece.path(self.chat);
        let Some(i) = piece.message else {
            return Err(format!(
                "{path}: not in the training text: the chat template does not write the row's tools\n  \
                 hint: a template that does (data.chat_template), or rows without tools"
            ));
        };
        let role = self.chat.role(i);
        if piece.kind == Kind::Reasoning && says_more {
            notes.push(Note::Reasoning);
            return Ok(());
        }
        let calls = self.chat.messages[i].get("tool_calls").is_some_and(|c| !says_nothing(c));
        let may = piece.kind == Kind::Content
            && (matches!(role, "system" | "developer") || (role == "assistant" && calls));
        if may && self.in_shorter(i, piece) {
            notes.push(Note::LeftOut(role.into()));
            return Ok(());
        }
        let what = if piece.kind == Kind::Call { "a call" } else { "a message" };
        Err(format!(
            "{path}: not in the training text as it is written: the chat template leaves it out or changes it ({what} \
             of role {role:?})\n  hint: a template that writes it (data.chat_template), or a row without it"
        ))
    }

    /// Whether the template renders a piece of message `i` in a shorter conversation.
    fn in_shorter(&self, i: usize, piece: &Piece) -> bool {
        let n = self.chat.messages.len();
        let marked = with_marks(&self.chat.messages[i], std::iter::once((0, &piece.spot)));
        (i..n.min(i + SHORTER)).any(|last| {
            let mut messages = self.plain[..=last].to_vec();
            messages[i] = jinja(&marked);
            let prompt = self.chat.role(last + 1) == "assistant";
            let Ok(seen) = (self.render)(&messages, self.tools, prompt, true) else { return false };
            let seen = Rendered::new(&seen);
            seen.all(0).any(|at| stands(&seen.text, at, piece.of(self.chat), ""))
        })
    }

    /// Checks numbers and booleans in calls: replaces them with marks, expected in the text. If the
    /// template rejects strings there, modified values must change the text.
    fn numbers(&self) -> Result<(), String> {
        let mut found: Vec<(usize, String, &Value)> = Vec::new();
        for (i, message) in self.chat.messages.iter().enumerate() {
            leaves(message, &mut |pointer, value| {
                if value.is_number() || value.is_boolean() {
                    found.push((i, pointer.into(), value));
                }
            });
        }
        if found.is_empty() {
            return Ok(());
        }
        let mut messages = self.chat.messages.clone();
        for (id, (i, pointer, _)) in found.iter().enumerate() {
            if let Some(value) = messages[*i].pointer_mut(pointer) {
                *value = mark(id).into();
            }
        }
        let messages: Vec<Jinja> = messages.iter().map(jinja).collect();
        let seen = (self.render)(&messages, self.tools, false, true).map(|s| Rendered::new(&s));
        for (id, (i, pointer, value)) in found.iter().enumerate() {
            if seen.as_ref().is_ok_and(|s| s.at(id).is_some()) {
                continue;
            }
            let other = |message: &Value| {
                let mut message = message.clone();
                if let Some(v) = message.pointer_mut(pointer) {
                    *v = match value {
                        Value::Bool(b) => (!b).into(),
                        Value::Number(n) => match n.as_i64() {
                            Some(n) => (n ^ 1).into(),
                            None => (n.as_f64().unwrap_or(0.0) / 2.0 + 1.5).into(),
                        },
                        _ => Value::Null,
                    };
                }
                message
            };
            if self.with(Some(*i), &other).is_some_and(|seen| seen.text == self.text) {
                return Err(format!(
                    "{}{}: not in the training text: the chat template leaves it out\n  hint: a template that writes \
                     it (data.chat_template), or a row without it",
                    self.chat.name(*i),
                    path(pointer)
                ));
            }
        }
        Ok(())
    }

    /// Adds a note for every message key without effect on the text.
    fn other_keys(&self, notes: &mut Vec<Note>) {
        let mut keys: BTreeSet<&str> = BTreeSet::new();
        for (i, message) in self.chat.messages.iter().enumerate() {
            let role = self.chat.role(i);
            let others = message.as_object().into_iter().flatten();
            keys.extend(
                others.filter(|(k, v)| !is_message_key(role, k) && !says_nothing(v)).map(|(k, _)| k.as_str()),
            );
        }
        if keys.is_empty() {
            return;
        }
        let same_without = |gone: &dyn Fn(&str) -> bool| {
            let without = |message: &Value| {
                let mut message = message.clone();
                let role = message["role"].as_str().unwrap_or_default().to_string();
                if let Value::Object(map) = &mut message {
                    map.retain(|k, _| is_message_key(&role, k) || !gone(k));
                }
                jinja(&message)
            };
            let messages: Vec<Jinja> = self.chat.messages.iter().map(without).collect();
            (self.render)(&messages, self.tools, false, true).is_ok_and(|t| t == self.text)
        };
        let all = same_without(&|_| true);
        let unused = keys.into_iter().filter(|key| all || same_without(&|k| k == *key));
        notes.extend(unused.map(|key| Note::MessageKey(key.to_string())));
    }
}
