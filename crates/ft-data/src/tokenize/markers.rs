//! Markers of a chat template unknown to the tokenizer.
//!
//! A template made for a different tokenizer yields markers split into several tokens: the model cannot
//! learn the end of a turn, and a token may extend into the adjacent text.

use super::tokenizer::Encoded;
use crate::shape::{messages::Chat, notes::Note};
use serde_json::Value;
use std::collections::HashMap;
use std::ops::Range;

/// Length in bytes of a marker at the start of `text`: `<|im_end|>`, `<｜User｜>`, `</s>`, `<start_of_turn>`,
/// `[INST]`.
fn marker(text: &str) -> Option<usize> {
    let len = |rest: &str| text.len() - rest.len();
    for (open, bar) in [("<|", '|'), ("<｜", '｜')] {
        let Some(rest) = text.strip_prefix(open) else { continue };
        let stop = rest.find(|c: char| c == bar || matches!(c, '<' | '>') || c.is_whitespace())?;
        let end = rest[stop..].strip_prefix(bar)?.strip_prefix('>')?;
        return (1..=64).contains(&rest[..stop].chars().count()).then_some(len(end));
    }
    if let Some(rest) = text.strip_prefix('<') {
        let rest = rest.strip_prefix('/').unwrap_or(rest);
        let stop = rest.find(|c: char| !matches!(c, 'a'..='z' | '0'..='9' | '_'))?;
        return is_name(&rest[..stop]).then_some(len(rest[stop..].strip_prefix('>')?));
    }
    let rest = text.strip_prefix('[')?;
    if let Some(end) = rest.strip_prefix("gMASK]") {
        return Some(len(end));
    }
    let rest = rest.strip_prefix('/').unwrap_or(rest);
    let stop = rest.find(|c: char| !matches!(c, 'A'..='Z' | '_'))?;
    let end = rest[stop..].strip_prefix(']')?;
    ((2..=31).contains(&stop) && !rest.starts_with('_')).then_some(len(end))
}

/// Whether a name is typical for markers between `<` and `>`.
fn is_name(name: &str) -> bool {
    let word =
        |w: Option<&str>| w.is_some_and(|w| !w.is_empty() && w.bytes().all(|b| b.is_ascii_lowercase()));
    let number = |n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit());
    matches!(name, "s" | "bos" | "eos" | "sop" | "eop" | "pad" | "unk")
        || ["start_of_", "end_of_"].iter().any(|p| word(name.strip_prefix(p)))
        || ["_start", "_end"].iter().any(|p| word(name.strip_suffix(p)))
        || name.strip_prefix("extra_id_").is_some_and(number)
}

/// Finds all markers of a text.
fn look(text: &str) -> Vec<Range<usize>> {
    let (mut out, mut at) = (Vec::new(), 0);
    while let Some(next) = text.as_bytes()[at..].iter().position(|b| matches!(b, b'<' | b'[')) {
        at += next;
        match marker(&text[at..]) {
            None => at += 1,
            Some(len) => {
                out.push(at..at + len);
                at += len;
            }
        }
    }
    out
}

/// Adds a note for every marker split into several tokens, if written by the template and not by the
/// conversation. `specials` are the special tokens named in the model folder.
pub(crate) fn note<'a>(
    text: &str,
    encoded: &Encoded,
    chat: &Chat,
    specials: impl Iterator<Item = &'a str>,
    notes: &mut Vec<Note>,
) {
    let mut found = look(text);
    for special in specials.filter(|s| !s.trim().is_empty() && marker(s) != Some(s.len())) {
        found.extend(text.match_indices(special).map(|(at, s)| at..at + s.len()));
    }
    let mut pieces: HashMap<&str, usize> = HashMap::new();
    // for a truncated text, only the first tokens are known
    if encoded.total > encoded.ids.len() {
        let known = encoded.offsets.last().map_or(0, |o| o.1);
        found.retain(|r| r.end <= known);
    }
    found.sort_by_key(|r| (r.start, r.end));
    found.dedup();
    for range in found {
        let token = encoded.offsets.partition_point(|o| o.0 < range.start);
        let whole =
            encoded.offsets[token..].iter().take_while(|o| o.0 == range.start).any(|o| o.1 == range.end);
        if !whole {
            *pieces.entry(&text[range]).or_default() += 1;
        }
    }
    for (marker, count) in pieces {
        let said: usize = chat.messages.iter().chain(&chat.tools).map(|v| times(v, marker)).sum();
        if count > said {
            notes.push(Note::Marker(marker.to_string()));
        }
    }
}

/// Number of occurrences of a marker in the strings of a value.
fn times(value: &Value, marker: &str) -> usize {
    match value {
        Value::String(s) => s.matches(marker).count(),
        Value::Array(list) => list.iter().map(|v| times(v, marker)).sum(),
        Value::Object(map) => map.iter().map(|(k, v)| k.matches(marker).count() + times(v, marker)).sum(),
        _ => 0,
    }
}

/// Whether a token crosses an edge of one of the sorted spans.
pub(crate) fn cuts(encoded: &Encoded, spans: &[Range<usize>]) -> bool {
    let over = |edge: usize| {
        let next = encoded.offsets.partition_point(|o| o.1 <= edge);
        encoded.offsets.get(next).is_some_and(|o| o.0 < edge)
    };
    spans.iter().any(|s| over(s.start) || over(s.end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ft_base::rng::{Purpose, Stream};

    /// The same markers as a regular expression.
    const PATTERN: &str = r"<\|[^|<>\s]{1,64}\|>|<｜[^｜<>\s]{1,64}｜>|</?(?:s|bos|eos|sop|eop|pad|unk|start_of_[a-z]+|end_of_[a-z]+|[a-z]+_start|[a-z]+_end|extra_id_[0-9]+)>|\[/?[A-Z][A-Z_]{1,30}\]|\[gMASK\]";

    #[test]
    fn markers_are_found_as_by_the_regular_expression() {
        let regex = regex::Regex::new(PATTERN).unwrap();
        let parts = [
            "<|",
            "|>",
            "<",
            ">",
            "</",
            "<｜",
            "｜>",
            "[",
            "[/",
            "]",
            "im_end",
            "｜",
            "|",
            "s",
            "bos",
            "start_of_",
            "end_of_",
            "_start",
            "_end",
            "extra_id_",
            "7",
            "turn",
            "INST",
            "A_B",
            "_",
            "gMASK",
            " ",
            "é",
            "\u{a0}",
            "X",
            "word",
            "<|im_end|>",
        ];
        let long = [63, 64, 65].map(|n| format!("<|{}|>[{}]", "é".repeat(n), "A".repeat(n - 33)));
        let draw = |t: u64| {
            let order = Stream::new(t, Purpose::Mix, 0, 0).permutation(parts.len() as u32 * 6);
            order.into_iter().map(|i| parts[i as usize % parts.len()]).collect::<String>()
        };
        let mut seen = 0;
        for text in (0..3000).map(draw).chain(long) {
            let want: Vec<Range<usize>> = regex.find_iter(&text).map(|m| m.range()).collect();
            assert_eq!(look(&text), want, "{text:?}");
            seen += want.len();
        }
        assert!(seen > 10_000, "{seen}");
    }

    /// The rows' own markers, in parts of a content and in names of a tool's properties too.
    #[test]
    fn markers_of_a_message_are_counted_at_any_depth() {
        let message =
            serde_json::json!({"role": "user", "content": [{"text": "<|a|> and <|a|>"}], "of": {"<|a|>": 1}});
        assert_eq!([times(&message, "<|a|>"), times(&message, "<|b|>")], [3, 0]);
    }
}
