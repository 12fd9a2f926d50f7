//! Inspects the steps of a `tokenizer.json` before the library loads it: rejects steps of unbounded cost,
//! and finds positions to cut a text without changing tokens.

use base64::alphabet;
use base64::engine::{DecodePaddingMode, Engine, GeneralPurpose, GeneralPurposeConfig};
use serde::Deserialize;
use serde_json::Value;

/// Longest regular expression, in bytes; bounds the nesting depth.
const PATTERN: usize = 4096;
/// Largest product of the repetition counts of a regular expression.
const COUNTS: u64 = 4096;
/// Largest growth factor of a text.
const GROWTH: u64 = 64;
/// Longest replacement of a character, in bytes.
const REPLACEMENT: usize = 256;
/// Longest word in characters; WordPiece is quadratic in it.
const WORD: u64 = 10_000;
/// Most tokens made of one by the post-processor.
const AROUND: u64 = 256;

/// The inspected parts of the file; the vocabulary is skipped.
#[derive(Deserialize)]
pub(crate) struct Pipeline {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    #[serde(default)]
    content: String,
    #[serde(default)]
    rstrip: bool,
}

#[derive(Default, Deserialize)]
struct Model {
    #[serde(default)]
    max_input_chars_per_word: Option<u64>,
}

impl Pipeline {
    /// Checks for steps of unbounded cost.
    ///
    /// # Errors
    /// The offending step, by path in the file.
    pub fn check(&self) -> Result<(), String> {
        for (name, part) in [
            ("normalizer", &self.normalizer),
            ("pre_tokenizer", &self.pre_tokenizer),
            ("decoder", &self.decoder),
        ] {
            let mut growth = 1;
            visit(part, &mut |item| check_item(item, &mut growth)).map_err(|why| format!("{name}: {why}"))?;
            if growth > GROWTH {
                return Err(format!("{name}: it could make a text {growth} times as long"));
            }
        }
        match self.model.max_input_chars_per_word {
            Some(n) if n > WORD => Err(format!("model.max_input_chars_per_word: {n} is more than {WORD}")),
            _ => Ok(()),
        }
    }

    /// Whether a text can be cut by [`cut`].
    pub fn can_cut(&self) -> bool {
        let letter = |c: Option<char>| c.is_some_and(char::is_alphabetic);
        let spans =
            |a: &Added| a.content.contains(is_between) || (a.rstrip && letter(a.content.chars().last()));
        normalizes_alone(&self.normalizer)
            && !self.added_tokens.iter().any(spans)
            && boundary(&self.pre_tokenizer) == Boundary::Here
    }
}

/// Visits the steps of a pipeline, including nested sequences.
fn visit(part: &Value, f: &mut dyn FnMut(&Value) -> Result<(), String>) -> Result<(), String> {
    for list in ["normalizers", "pretokenizers", "decoders", "processors"] {
        for item in part.get(list).and_then(Value::as_array).into_iter().flatten() {
            visit(item, f)?;
        }
    }
    f(part)
}

fn kind(part: &Value) -> &str {
    part.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn check_item(item: &Value, growth: &mut u64) -> Result<(), String> {
    let text = |key: &str| item.get(key).and_then(Value::as_str);
    let regex = item.pointer("/pattern/Regex").and_then(Value::as_str);
    if let Some(regex) = regex {
        check_regex(regex)?;
    }
    match kind(item) {
        "Replace" => {
            let plain = item.pointer("/pattern/String").and_then(Value::as_str);
            if plain.or(regex).is_some_and(str::is_empty) {
                return Err("Replace: the pattern is empty".into());
            }
            // a regular expression matches at least one byte, or the empty string between any two bytes
            let (from, to) = (plain.map_or(1, str::len), text("content").map_or(0, str::len));
            let more = if plain.is_some() { to.div_ceil(from) } else { to + 1 };
            // replacements shorter than the match add nothing
            *growth = growth.saturating_mul((more as u64).max(1));
            Ok(())
        }
        "Prepend" if text("prepend").is_some_and(|p| p.len() > REPLACEMENT) => {
            Err(format!("Prepend: it is longer than {REPLACEMENT} bytes"))
        }
        "FixedLength" if item.get("length").and_then(Value::as_u64) == Some(0) => {
            Err("FixedLength: length is 0".into())
        }
        "Precompiled" => check_charsmap(text("precompiled_charsmap").unwrap_or_default()),
        _ => Ok(()),
    }
}

/// Checks the number of tokens made of one by a post-processor, as the library writes it.
///
/// # Errors
/// More than [`AROUND`].
pub(crate) fn check_post_processor(part: &Value) -> Result<(), String> {
    let mut tokens = 1u64;
    visit(part, &mut |item| {
        let Some(pieces) = item.get("single").and_then(Value::as_array) else { return Ok(()) };
        let added = |id: &str| item["special_tokens"][id]["ids"].as_array().map_or(0, Vec::len);
        let special = |p: &Value| p["SpecialToken"]["id"].as_str().map(added);
        let texts = pieces.iter().filter(|p| p.get("Sequence").is_some()).count();
        let all: usize = pieces.iter().filter_map(special).sum();
        tokens = tokens.saturating_mul(texts as u64).saturating_add(all as u64);
        if tokens > AROUND {
            return Err(format!("post_processor: it makes {tokens} tokens of one, more than {AROUND}"));
        }
        Ok(())
    })
}

/// Checks the compiled size of a regular expression, since repetition counts are unrolled.
fn check_regex(regex: &str) -> Result<(), String> {
    if regex.len() > PATTERN {
        return Err(format!("a regular expression has {} bytes, more than {PATTERN}", regex.len()));
    }
    let mut counts = 1u64;
    for part in regex.split('{').skip(1) {
        let Some((inside, _)) = part.split_once('}') else { continue };
        let numbers = inside.split(',').filter_map(|n| n.trim().parse::<u64>().ok());
        counts = counts.saturating_mul(numbers.max().unwrap_or(1).max(1));
    }
    if counts > COUNTS {
        Err(format!("a regular expression has counts that multiply to {counts}, more than {COUNTS}"))
    } else {
        Ok(())
    }
}

/// Checks the character map of SentencePiece: length of the trie, the trie, and the replacement strings.
fn check_charsmap(text: &str) -> Result<(), String> {
    let fail = |why: String| Err(format!("Precompiled: precompiled_charsmap {why}"));
    let Ok(bytes) = BASE64.decode(text) else { return fail("is not base64".into()) };
    let Some((size, rest)) = bytes.split_first_chunk::<4>() else { return fail("is cut short".into()) };
    let size = u32::from_le_bytes(*size) as usize;
    if size > rest.len() || size < 4 {
        return fail(format!("says that its trie has {size} bytes, and {} follow", rest.len()));
    }
    let longest = rest[size..].split(|b| *b == 0).map(<[u8]>::len).max().unwrap_or(0);
    if longest > REPLACEMENT {
        return fail(format!("replaces a character by {longest} bytes, more than {REPLACEMENT}"));
    }
    Ok(())
}

/// Base64 with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Characters that end a word.
fn is_between(c: char) -> bool {
    matches!(c, ' ' | '\n' | '。' | '，')
}

/// Letters no normalizer combines with the next character.
fn is_letter(c: char) -> bool {
    c.is_ascii_alphabetic() || ('\u{4E00}'..='\u{9FFF}').contains(&c)
}

/// Finds the first safe cut at or after `from`: before a single separator between two letters. A word ends
/// at this position for any continuation, and splitting the rest does not depend on the text before.
pub(crate) fn cut(text: &str, from: usize) -> Option<usize> {
    let from = text.ceil_char_boundary(from);
    let mut before = [None; 2];
    let mut place = from;
    for (at, c) in text[from..].char_indices() {
        if let [Some(a), Some(b)] = before
            && is_letter(a)
            && is_between(b)
            && is_letter(c)
        {
            return Some(place);
        }
        before = [before[1], Some(c)];
        place = from + at;
    }
    None
}

/// Whether a normalizer acts on both sides of a cut independently.
fn normalizes_alone(part: &Value) -> bool {
    match kind(part) {
        _ if part.is_null() => true,
        "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" => true,
        "Sequence" => part
            .get("normalizers")
            .and_then(Value::as_array)
            .is_some_and(|list| list.iter().all(normalizes_alone)),
        _ => false,
    }
}

/// Behavior of a pre-tokenizer at a cut.
#[derive(PartialEq)]
enum Boundary {
    /// Always splits.
    Here,
    /// May leave the cut inside a piece. It splits each piece by that piece's characters alone, so a later step can
    /// still split at the cut.
    Over,
    /// Not known.
    Unknown,
}

/// Regular expressions without look-behind that always end a match at a cut: GPT-2, GPT-4 and Llama 3, Qwen
/// 2, DeepSeek, GPT-4o, Mistral's Tekken.
pub(crate) const WORDS: &[&str] = &[
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

fn boundary(part: &Value) -> Boundary {
    let is = |key: &str, value: bool| part.get(key).and_then(Value::as_bool) == Some(value);
    let behavior = part.get("behavior").and_then(Value::as_str).unwrap_or_default();
    let regex = part.pointer("/pattern/Regex").and_then(Value::as_str);
    match kind(part) {
        "ByteLevel" if !is("add_prefix_space", false) => Boundary::Unknown,
        "ByteLevel" if is("use_regex", false) => Boundary::Over,
        "ByteLevel" | "Whitespace" | "BertPreTokenizer" => Boundary::Here,
        "Split" => match regex {
            Some(r) if WORDS.contains(&r) => match (behavior, is("invert", true)) {
                ("Isolated", _) | ("Removed", true) => Boundary::Here,
                _ => Boundary::Unknown,
            },
            Some(r"\p{N}{1,3}" | r"\p{N}" | r"\d") if behavior == "Isolated" => Boundary::Over,
            _ => Boundary::Unknown,
        },
        "Digits" => Boundary::Over,
        "Sequence" => {
            let parts = part.get("pretokenizers").and_then(Value::as_array).into_iter().flatten();
            // steps after a boundary only see the separate pieces
            for p in parts {
                match boundary(p) {
                    Boundary::Over => {}
                    known => return known,
                }
            }
            Boundary::Over
        }
        _ => Boundary::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(part: &str, value: Value) -> Result<(), String> {
        let pipeline: Pipeline = serde_json::from_value(json!({ part: value })).map_err(|e| e.to_string())?;
        pipeline.check()
    }

    #[test]
    fn tokenizer_parts_that_grow_without_bound_are_refused() {
        let replace =
            |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
        let split =
            |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"});
        let many = |n: usize| json!({"type": "Sequence", "normalizers": vec![replace("a", "aa"); n]});
        assert!(check("normalizer", replace("", "a")).is_err());
        assert!(check("normalizer", many(6)).is_ok() && check("normalizer", many(7)).is_err());
        assert!(check("decoder", replace("▁", " ")).is_ok());
        assert!(check("pre_tokenizer", split(WORDS[3])).is_ok());
        assert!(check("pre_tokenizer", split("(?=a){999}{999}")).is_err());
        assert!(check("pre_tokenizer", split(&"(".repeat(9999))).is_err());
        assert!(check("pre_tokenizer", json!({"type": "FixedLength", "length": 0})).is_err());
        let map =
            |text: &str| check("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": text}));
        assert!(map("AAAA").is_err() && map("////////////////").is_err() && map("A?").is_err());
        // a trie of one unit, and one replacement
        assert!(map("BAAAAAAAAABhAA==").is_ok());
        assert!(check("model", json!({"max_input_chars_per_word": 1_000_000})).is_err());
    }

    #[test]
    fn post_processors_that_add_without_bound_are_refused() {
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let mark = json!({"SpecialToken": {"id": "x", "type_id": 0}});
        let template = |texts: usize, marks: usize, ids: usize| {
            let single = [vec![text.clone(); texts], vec![mark.clone(); marks]].concat();
            let x = json!({"id": "x", "ids": vec![1; ids], "tokens": vec!["x"; ids]});
            json!({"type": "TemplateProcessing", "single": single, "special_tokens": {"x": x}})
        };
        let both = |part: Value| json!({"type": "Sequence", "processors": [part.clone(), part]});
        assert!(check_post_processor(&Value::Null).is_ok());
        assert!(check_post_processor(&json!({"type": "ByteLevel"})).is_ok());
        assert!(check_post_processor(&both(template(1, 2, 8))).is_ok());
        assert!(check_post_processor(&template(1, 16, 16)).is_err());
        assert!(check_post_processor(&both(template(17, 0, 0))).is_err());
    }

    #[test]
    fn texts_are_cut_before_separators_of_letters() {
        assert_eq!(cut("ab  cd ef", 0), Some(6));
        assert_eq!(cut("ab.\ncd\nef", 0), Some(6));
        assert_eq!(cut("ab cd", 3), None);
        assert_eq!(cut("中文。中文", 0), Some(6));
        assert_eq!(cut("a 1 é \u{301}b", 0), None);
    }
}
