//! Markers that a chat template writes and the tokenizer has no token for.
//!
//! A template that belongs to another tokenizer spells its markers in pieces: a model never learns where a turn ends,
//! and a piece may reach into the text beside it.

use super::messages::Chat;
use super::notes::Note;
use super::tokenizer::Encoded;
use regex::Regex;
use serde_json::Value;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::OnceLock;

/// What markers look like: `<|im_end|>`, `<｜User｜>`, `<start_of_turn>`, `</s>`, `[INST]`.
fn look() -> Option<&'static Regex> {
    static LOOK: OnceLock<Option<Regex>> = OnceLock::new();
    let pattern = r"<\|[^|<>\s]{1,64}\|>|<｜[^｜<>\s]{1,64}｜>|</?(?:s|bos|eos|sop|eop|pad|unk|start_of_[a-z]+|end_of_[a-z]+|[a-z]+_start|[a-z]+_end|extra_id_\d+)>|\[/?[A-Z][A-Z_]{1,30}\]|\[gMASK\]";
    LOOK.get_or_init(|| Regex::new(pattern).ok()).as_ref()
}

/// Notes the markers of a text that are more tokens than one, where the template wrote them and not the conversation.
/// `specials` are the tokens that the model's folder names.
pub(super) fn note<'a>(
    text: &str,
    encoded: &Encoded,
    chat: &Chat,
    specials: impl Iterator<Item = &'a str>,
    notes: &mut Vec<Note>,
) {
    let mut found: Vec<Range<usize>> =
        look().into_iter().flat_map(|l| l.find_iter(text)).map(|m| m.range()).collect();
    for special in specials.filter(|s| !s.trim().is_empty()) {
        found.extend(text.match_indices(special).map(|(at, s)| at..at + s.len()));
    }
    let mut pieces: HashMap<&str, usize> = HashMap::new();
    // of a text that is cut, the first tokens are known
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

/// How often the strings of a value hold a marker.
fn times(value: &Value, marker: &str) -> usize {
    match value {
        Value::String(s) => s.matches(marker).count(),
        Value::Array(list) => list.iter().map(|v| times(v, marker)).sum(),
        Value::Object(map) => map.iter().map(|(k, v)| k.matches(marker).count() + times(v, marker)).sum(),
        _ => 0,
    }
}

/// Whether a token reaches over an edge of one of the spans, which are in order.
pub(super) fn cuts(encoded: &Encoded, spans: &[Range<usize>]) -> bool {
    let over = |edge: usize| {
        let next = encoded.offsets.partition_point(|o| o.1 <= edge);
        encoded.offsets.get(next).is_some_and(|o| o.0 < edge)
    };
    spans.iter().any(|s| over(s.start) || over(s.end))
}
