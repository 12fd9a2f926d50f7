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

use super::fragments::{Fragment, Kind, path, visit_calls};
use super::marks::{MarkPosition, Rendered, jinja, mark, with_marks};
use super::rendering::Rendering;
use super::spans::Marked;
use super::template::json::escaped;
use crate::shape::{
    keys::{is_message_key, says_nothing},
    notes::Note,
};
use minijinja::Value as Jinja;
use serde_json::Value;
use std::collections::BTreeSet;

/// Maximum number of shorter conversations to render.
const SHORTER: usize = 4;

/// Whether `text` around offset `at` equals `before` and `behind`, verbatim or JSON-escaped.
fn stands(text: &str, at: usize, before: &str, behind: &str) -> bool {
    let (head, tail) = text.split_at(at);
    (head.ends_with(before) && tail.starts_with(behind))
        || [false, true]
            .into_iter()
            .any(|ascii| head.ends_with(&escaped(before, ascii)) && tail.starts_with(&escaped(behind, ascii)))
}

impl Rendering<'_> {
    /// Checks the text against the conversation. `marked` is the rendering with a mark at the end of every
    /// fragment, if marks leave the text unchanged.
    ///
    /// # Errors
    /// Missing content, by path.
    pub fn check(
        &self,
        fragments: &[Fragment],
        marked: Option<&Marked>,
        notes: &mut Vec<Note>,
    ) -> Result<(), String> {
        let found = |(id, fragment): (usize, &Fragment)| {
            let whole = fragment.of(self.chat);
            match marked {
                Some(m) => m.whole.all(id).any(|at| stands(self.text, at, whole, "")),
                None => self.found_alone(fragment, whole),
            }
        };
        for (id, fragment) in fragments.iter().enumerate() {
            // the same reasoning under another name
            let is_same = |(_, other): &(usize, &Fragment)| {
                fragment.kind == Kind::Reasoning
                    && (other.message, other.kind) == (fragment.message, fragment.kind)
                    && other.of(self.chat) == fragment.of(self.chat)
            };
            if !found((id, fragment)) && !fragments.iter().enumerate().filter(is_same).any(found) {
                let more = |p: &Fragment| p.message == fragment.message && p.kind != Kind::Reasoning;
                let says_more = fragments.iter().any(more);
                self.lacks(fragment, says_more, notes)?;
            }
        }
        self.numbers()?;
        self.other_keys(notes);
        Ok(())
    }

    /// Checks one fragment if marks in all fragments change the text: with a single mark, at the end or in the
    /// middle. If these also change the text, requires the text to contain the fragment and to change with it.
    fn found_alone(&self, fragment: &Fragment, whole: &str) -> bool {
        let middle = whole.floor_char_boundary(whole.len() / 2);
        for at in [whole.len(), middle] {
            let position =
                MarkPosition { pointer: fragment.position.pointer.clone(), at: fragment.start + at };
            let seen = self.with(fragment.message, &|v| with_marks(v, std::iter::once((0, &position))));
            if let Some(seen) = seen.filter(|s| s.text == self.text) {
                return seen.all(0).any(|p| stands(self.text, p, &whole[..at], &whole[at..]));
            }
        }
        let other = |v: &Value| {
            let mut v = v.clone();
            if let Some(Value::String(field)) = v.pointer_mut(&fragment.position.pointer) {
                field.insert(fragment.position.at, 'q');
            }
            v
        };
        let holds = self.text.contains(whole)
            || [false, true].into_iter().any(|ascii| self.text.contains(&escaped(whole, ascii)));
        holds && self.with(fragment.message, &other).is_none_or(|seen| seen.text != self.text)
    }

    /// Renders the conversation with a modified message or tool list; `None` if the template raises an
    /// error.
    fn with(&self, message: Option<usize>, other: &dyn Fn(&Value) -> Value) -> Option<Rendered> {
        let mut messages = self.messages.to_vec();
        let mut tools = self.tools.clone();
        match message {
            Some(i) => messages[i] = jinja(&other(&self.chat.messages[i])),
            None => tools = self.chat.tools.as_ref().map_or(tools, |t| jinja(&other(t))),
        }
        self.of(&messages, &tools)
    }

    /// Handles a missing fragment: adds a note or returns an error. `says_more` means the message contains
    /// more than reasoning; otherwise dropping the reasoning would empty the message.
    fn lacks(&self, fragment: &Fragment, says_more: bool, notes: &mut Vec<Note>) -> Result<(), String> {
        let path = fragment.path(self.chat);
        let Some(i) = fragment.message else {
            return Err(format!(
                "{path}: not in the training text: the chat template does not write the row's tools\n  \
                 hint: a template that does (data.chat_template), or rows without tools"
            ));
        };
        let role = self.chat.role(i);
        if fragment.kind == Kind::Reasoning && says_more {
            notes.push(Note::Reasoning);
            return Ok(());
        }
        let calls = self.chat.messages[i].get("tool_calls").is_some_and(|c| !says_nothing(c));
        let may = fragment.kind == Kind::Content
            && (matches!(role, "system" | "developer") || (role == "assistant" && calls));
        if may && self.in_shorter(i, fragment) {
            notes.push(Note::LeftOut(role.into()));
            return Ok(());
        }
        let what = if fragment.kind == Kind::Call { "a call" } else { "a message" };
        Err(format!(
            "{path}: not in the training text as it is written: the chat template leaves it out or changes it ({what} \
             of role {role:?})\n  hint: a template that writes it (data.chat_template), or a row without it"
        ))
    }

    /// Whether the template renders a fragment of message `i` in a shorter conversation.
    fn in_shorter(&self, i: usize, fragment: &Fragment) -> bool {
        let n = self.chat.messages.len();
        let marked = with_marks(&self.chat.messages[i], std::iter::once((0, &fragment.position)));
        (i..n.min(i + SHORTER)).any(|last| {
            let mut messages = self.messages[..=last].to_vec();
            messages[i] = jinja(&marked);
            let prompt = self.chat.role(last + 1) == "assistant";
            let Ok(seen) = (self.render)(&messages, self.tools, prompt, true) else { return false };
            let seen = Rendered::new(&seen);
            seen.all(0).any(|at| stands(&seen.text, at, fragment.of(self.chat), ""))
        })
    }

    /// Checks numbers and booleans in calls: replaces them with marks, expected in the text. If the
    /// template rejects strings there, modified values must change the text.
    fn numbers(&self) -> Result<(), String> {
        let mut found: Vec<(usize, String, &Value)> = Vec::new();
        for (i, message) in self.chat.messages.iter().enumerate() {
            visit_calls(message, &mut |pointer, value| {
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
        let seen = self.of(&messages, self.tools);
        for (id, (i, pointer, value)) in found.iter().enumerate() {
            if seen.as_ref().is_some_and(|s| s.at(id).is_some()) {
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
