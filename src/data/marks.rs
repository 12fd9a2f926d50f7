//! Invisible marks in the strings of a conversation: where they come out in a rendering is where the template wrote
//! those strings, whatever look-alikes the conversation holds.

use super::template::is_reserved;
use minijinja::Value as Jinja;
use minijinja::value::Serde;
use serde_json::Value;

const OPEN: char = '\u{FDD2}';
const CLOSE: char = '\u{FDD3}';
const DIGITS: u32 = 0xFDD4;

/// A place for a mark: a string inside a value, and the byte in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub pointer: String,
    pub at: usize,
}

/// The value with marks in its strings: each with its number.
pub(super) fn with_marks<'a>(value: &Value, marks: impl Iterator<Item = (usize, &'a Spot)>) -> Value {
    let mut out = value.clone();
    let mut marks: Vec<(usize, &Spot)> = marks.collect();
    // from behind, so that places stay where they are
    marks.sort_by_key(|(_, spot)| std::cmp::Reverse(spot.at));
    for (id, spot) in marks {
        if let Some(Value::String(text)) = out.pointer_mut(&spot.pointer) {
            text.insert_str(spot.at, &mark(id));
        }
    }
    out
}

/// Mark number `id`.
pub(super) fn mark(id: usize) -> String {
    let mut out = String::from(OPEN);
    // 16 digits, each a noncharacter
    out.extend(format!("{id:x}").chars().filter_map(|c| char::from_u32(DIGITS + c.to_digit(16)?)));
    out.push(CLOSE);
    out
}

/// A value as templates take it.
pub(super) fn jinja(value: &Value) -> Jinja {
    Jinja::from(Serde(value))
}

/// A rendering with its marks taken out: where they stood, in order of place.
pub(super) struct Rendered {
    pub text: String,
    pub marks: Vec<(usize, usize)>,
}

impl Rendered {
    pub fn new(marked: &str) -> Self {
        let mut this = Self { text: String::with_capacity(marked.len()), marks: Vec::new() };
        let mut id = 0usize;
        for c in marked.chars() {
            match c {
                OPEN => id = 0,
                CLOSE => this.marks.push((id, this.text.len())),
                c if is_reserved(c) => id = id << 4 | (c as u32).wrapping_sub(DIGITS) as usize & 15,
                c => this.text.push(c),
            }
        }
        this
    }

    /// Where mark `id` stood last.
    pub fn at(&self, id: usize) -> Option<usize> {
        self.marks.iter().rev().find(|m| m.0 == id).map(|m| m.1)
    }

    /// All places where mark `id` stood.
    pub fn all(&self, id: usize) -> impl Iterator<Item = usize> + '_ {
        self.marks.iter().filter(move |m| m.0 == id).map(|m| m.1)
    }
}
