//! BPE over characters with marks for spaces, as SentencePiece makes it: Llama 2, Mistral, Mixtral, Phi-3, Gemma.

use super::super::{Error, refuse};
use serde_json::{Map, Value};
use std::collections::HashMap;

const MARK: &str = "\u{2581}";

/// Places of added marks: spaces absent from the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prefix {
    Never,
    /// The start of a text and of its parts behind special tokens.
    Parts,
    /// The same, of parts without a leading space.
    BarePart,
    /// The start of a text, if it begins with no space.
    BareText,
}

impl Prefix {
    /// `add_space_prefix` of llama.cpp, which knows [`Prefix::Never`] and [`Prefix::Parts`]. Chats begin with a special
    /// token, plain texts do not.
    pub(super) fn in_llama_cpp(self, chats: bool) -> bool {
        match self {
            Prefix::Never => false,
            Prefix::Parts | Prefix::BarePart => true,
            Prefix::BareText => !chats,
        }
    }

    /// Texts with other tokens in llama.cpp.
    pub(super) fn difference(self, chats: bool) -> Option<&'static str> {
        match (self, chats) {
            (Prefix::Never | Prefix::Parts, _) => None,
            (Prefix::BarePart, _) => Some(
                "llama.cpp puts a mark for a space before each part of a text, also one that begins with a space: such \
                 a part has a token more than in training",
            ),
            (Prefix::BareText, true) => Some(
                "the tokenizer puts a mark for a space before a text, and not behind special tokens, which llama.cpp \
                 cannot: the file says no mark, as chats need it. A text that begins with no special token lacks the \
                 mark of its first word",
            ),
            (Prefix::BareText, false) => Some(
                "the tokenizer puts a mark for a space before a text, and not behind special tokens, which llama.cpp \
                 cannot: the file says a mark, as plain texts need it. Words behind special tokens have one too many, \
                 as have texts that begin with a space",
            ),
        }
    }
}

/// The steps of a normalizer or pre-tokenizer.
fn steps<'a>(part: Option<&'a Value>, list: &str) -> Vec<&'a Value> {
    match part {
        None | Some(Value::Null) => Vec::new(),
        Some(own) if own["type"] == "Sequence" => own[list].as_array().into_iter().flatten().collect(),
        Some(own) => vec![own],
    }
}

/// The prefix of a tokenizer that puts marks in place of spaces and neither changes nor splits a text otherwise.
pub(super) fn prefix(file: &Map<String, Value>) -> Option<Prefix> {
    let prepends = |s: &Value| s["type"] == "Prepend" && s["prepend"] == MARK;
    let replaces =
        |s: &Value| s["type"] == "Replace" && s["pattern"]["String"] == " " && s["content"] == MARK;
    // No space is left to split at.
    let whole = |all: &[&Value]| all.iter().all(|s| s["type"] == "Split" && s["pattern"]["String"] == " ");
    let normalizer = steps(file.get("normalizer"), "normalizers");
    let pre = steps(file.get("pre_tokenizer"), "pretokenizers");
    match (&normalizer[..], &pre[..]) {
        ([one], rest) if replaces(one) && whole(rest) => Some(Prefix::Never),
        ([first, second], rest) if prepends(first) && replaces(second) && whole(rest) => Some(Prefix::Parts),
        ([], [one]) if one["type"] == "Metaspace" && one["replacement"] == MARK => scheme(one),
        _ => None,
    }
}

/// The prefix of a `Metaspace`, of today's or older releases of tokenizers.
fn scheme(metaspace: &Value) -> Option<Prefix> {
    match metaspace["prepend_scheme"].as_str() {
        _ if metaspace["add_prefix_space"] == false => Some(Prefix::Never),
        Some("never") => Some(Prefix::Never),
        Some("first") => Some(Prefix::BareText),
        Some("always") | None => Some(Prefix::BarePart),
        Some(_) => None,
    }
}

/// Refuses vocabularies that llama.cpp merges otherwise.
pub(super) fn check(place: &str, file: &Map<String, Value>) -> Result<(), Error> {
    let tokens = file.get("model").and_then(|m| m["vocab"].as_object());
    let has = |byte: &u8| tokens.is_some_and(|t| t.contains_key(&format!("<0x{byte:02X}>")));
    if let Some(byte) = (0..=u8::MAX).find(|b| !has(b)) {
        let why = format!("model.vocab: no token <0x{byte:02X}>; llama.cpp needs one for each byte");
        return refuse(place, why);
    }
    let pre = file.get("pre_tokenizer").unwrap_or(&Value::Null);
    if pre["type"] != "Metaspace" || pre["split"] == false {
        return Ok(());
    }
    let inside = |t: &str| t.char_indices().any(|(at, c)| at > 0 && MARK.starts_with(c));
    match tokens.into_iter().flatten().find(|(t, _)| inside(t)) {
        None => Ok(()),
        Some((token, _)) => refuse(
            place,
            format!("pre_tokenizer.split: words are split at marks, and llama.cpp merges them to {token:?}"),
        ),
    }
}

/// Scores of llama.cpp's SentencePiece: what merges first has the highest.
pub(super) fn scores(tokens: &[String], merges: &[String]) -> Vec<f32> {
    let mut first: HashMap<String, usize> = HashMap::new();
    for (rank, merge) in merges.iter().enumerate() {
        // A part may begin with a space of its own, and none ends with one.
        if let Some(at) = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at) {
            first.entry([&merge[..at], &merge[at + 1..]].concat()).or_insert(rank);
        }
    }
    tokens.iter().map(|t| -(*first.get(t).unwrap_or(&merges.len()) as f32)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(normalizer: Value, pre: Value) -> Map<String, Value> {
        let mut file = Map::new();
        file.insert("normalizer".into(), normalizer);
        file.insert("pre_tokenizer".into(), pre);
        file
    }

    #[test]
    fn prefixes_of_published_tokenizers_are_recognized() {
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": MARK});
        let prepend = json!({"type": "Prepend", "prepend": MARK});
        let both = json!({"type": "Sequence", "normalizers": [prepend, replace]});
        let metaspace =
            |scheme: &str| json!({"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme});
        let old = json!({"type": "Metaspace", "replacement": MARK, "add_prefix_space": true});
        for (normalizer, pre, want) in [
            (replace.clone(), Value::Null, Some(Prefix::Never)),
            (both.clone(), Value::Null, Some(Prefix::Parts)),
            (Value::Null, metaspace("never"), Some(Prefix::Never)),
            (Value::Null, metaspace("first"), Some(Prefix::BareText)),
            (Value::Null, metaspace("always"), Some(Prefix::BarePart)),
            (Value::Null, old, Some(Prefix::BarePart)),
            (json!({"type": "NFKC"}), metaspace("first"), None),
            (both, metaspace("first"), None),
            (replace, json!({"type": "Digits"}), None),
        ] {
            assert_eq!(prefix(&of(normalizer.clone(), pre.clone())), want, "{normalizer} {pre}");
        }
    }

    #[test]
    fn tokenizers_that_llama_cpp_merges_differently_are_refused() {
        let bytes = (0..=u8::MAX).map(|b| format!("<0x{b:02X}>"));
        let vocab = |more: &str| -> Map<String, Value> {
            bytes.clone().chain([more.into()]).enumerate().map(|(i, t)| (t, json!(i))).collect()
        };
        let file = |split: bool, more: &str| {
            let pre =
                json!({"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": split});
            let mut file = of(Value::Null, pre);
            file.insert("model".into(), json!({"vocab": vocab(more)}));
            file
        };
        assert!(check("f", &file(false, "\u{2581}\u{2581}")).is_ok());
        assert!(check("f", &file(true, "\u{2581}a")).is_ok());
        let refused = |file| check("f", &file).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(refused(file(true, "\u{2581}\u{2581}")).contains("f: pre_tokenizer.split"));
        let mut none = file(false, "a");
        none.insert("model".into(), json!({"vocab": {"a": 0}}));
        assert!(refused(none).contains("<0x00>"));
    }
}
