//! Invisible marks in the strings of a conversation. The position of a mark in the rendered text shows the
//! position of the string, regardless of look-alikes.

use crate::shape::{keys::with_reasoning, values::is_reserved};
use minijinja::Value as Jinja;
use minijinja::value::Serde;
use serde_json::Value;

const OPEN: char = '\u{FDD2}';
const CLOSE: char = '\u{FDD3}';
const DIGITS: u32 = 0xFDD4;
const FIRST_BYTE: u8 = 0xEF;

/// A mark position: JSON pointer to a string, and byte offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MarkPosition {
    pub pointer: String,
    pub at: usize,
}

/// Inserts marks with the given ids into the strings of a value.
pub(super) fn with_marks<'a>(value: &Value, marks: impl Iterator<Item = (usize, &'a MarkPosition)>) -> Value {
    let mut out = value.clone();
    let mut marks: Vec<(usize, &MarkPosition)> = marks.collect();
    // back to front, so earlier offsets stay valid
    marks.sort_by_key(|(_, position)| std::cmp::Reverse(position.at));
    for (id, position) in marks {
        if let Some(Value::String(text)) = field_mut(&mut out, &position.pointer) {
            text.insert_str(position.at, &mark(id));
        }
    }
    out
}

/// Encodes mark `id`.
pub(super) fn mark(id: usize) -> String {
    let mut out = String::from(OPEN);
    // hexadecimal digits, encoded as noncharacters
    let digits = id.checked_ilog2().map_or(1, |n| n / 4 + 1);
    let digit = |d: u32| char::from_u32(DIGITS + (id >> (4 * d)) as u32 % 16);
    out.extend((0..digits).rev().filter_map(digit));
    out.push(CLOSE);
    out
}

/// The key of a one-step pointer without escapes. This common case avoids a copy.
fn only_key(pointer: &str) -> Option<&str> {
    pointer.strip_prefix('/').filter(|key| !key.bytes().any(|b| matches!(b, b'/' | b'~')))
}

/// Resolves a pointer, as [`Value::pointer`].
pub(crate) fn field<'a>(value: &'a Value, pointer: &str) -> Option<&'a Value> {
    match (value, only_key(pointer)) {
        (Value::Object(map), Some(key)) => map.get(key),
        _ => value.pointer(pointer),
    }
}

fn field_mut<'a>(value: &'a mut Value, pointer: &str) -> Option<&'a mut Value> {
    match only_key(pointer) {
        Some(key) if value.is_object() => value.get_mut(key),
        _ => value.pointer_mut(pointer),
    }
}

/// Converts a message or a list of tools for use in templates.
pub(crate) fn jinja(value: &Value) -> Jinja {
    Jinja::from(Serde(&*with_reasoning(value)))
}

/// A rendering with marks removed.
pub(crate) struct Rendered {
    pub text: String,
    /// The (id, offset) pairs of the marks in order of offset.
    pub marks: Vec<(usize, usize)>,
    /// The same in order of id and offset.
    by_id: Vec<(usize, usize)>,
}

impl Rendered {
    pub fn new(marked: &str) -> Self {
        let mut this =
            Self { text: String::with_capacity(marked.len()), marks: Vec::new(), by_id: Vec::new() };
        let (mut id, mut from, mut at) = (0usize, 0, 0);
        // first byte of all mark characters, and rare otherwise
        while let Some(next) = marked.as_bytes()[at..].iter().position(|b| *b == FIRST_BYTE) {
            at += next;
            let Some(c) = marked[at..].chars().next() else { break };
            let end = at + c.len_utf8();
            if is_reserved(c) {
                this.text.push_str(&marked[from..at]);
                from = end;
            }
            match c {
                OPEN => id = 0,
                CLOSE => this.marks.push((id, this.text.len())),
                c if is_reserved(c) => id = id << 4 | (c as u32).wrapping_sub(DIGITS) as usize & 15,
                _ => {}
            }
            at = end;
        }
        this.text.push_str(&marked[from..]);
        this.by_id.clone_from(&this.marks);
        this.by_id.sort_unstable();
        this
    }

    /// Last position of mark `id`.
    pub fn at(&self, id: usize) -> Option<usize> {
        self.all(id).last()
    }

    /// All positions of mark `id`, in order.
    pub fn all(&self, id: usize) -> impl Iterator<Item = usize> + '_ {
        let first = self.by_id.partition_point(|m| m.0 < id);
        self.by_id[first..].iter().take_while(move |m| m.0 == id).map(|m| m.1)
    }
}
