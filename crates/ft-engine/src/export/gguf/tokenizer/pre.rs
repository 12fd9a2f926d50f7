//! llama.cpp's names of the ways to split a text before byte-level BPE.

use super::super::{Error, refuse};
use serde_json::{Map, Value};

/// Regex of Llama 3, and of cl100k.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Regex of Qwen 2 and 3.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Regex of Qwen 3.5.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Regex of gpt-oss.
const GPT_OSS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Regex of Mistral's Tekken.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Whether a step maps bytes to characters, and splits by GPT-2's regex or not at all.
fn is_bytes(step: &Value, splits: bool) -> bool {
    step["type"] == "ByteLevel" && step["add_prefix_space"] != true && (step["use_regex"] != false) == splits
}

/// The regex of a step whose matches are the parts. No text is between the matches of the known ones.
fn regex(step: &Value) -> Option<&str> {
    let matches = match step["behavior"].as_str()? {
        "Isolated" => step["invert"] != true,
        "Removed" => step["invert"] == true,
        _ => false,
    };
    (step["type"] == "Split" && matches).then(|| step["pattern"]["Regex"].as_str())?
}

/// llama.cpp's name of the pre-tokenizer.
///
/// # Errors
/// An unknown one.
pub(super) fn pre_tokenizer(place: &str, file: &Map<String, Value>) -> Result<String, Error> {
    let pre = file.get("pre_tokenizer").unwrap_or(&Value::Null);
    let alone = std::slice::from_ref(pre);
    let steps = pre["pretokenizers"].as_array().map_or(alone, Vec::as_slice);
    let ignores_merges = file.get("model").is_some_and(|m| m["ignore_merges"] == true);
    let known = match steps {
        [bytes] if is_bytes(bytes, true) => Some("gpt-2"),
        [digits, bytes]
            if digits["type"] == "Digits" && digits["individual_digits"] == true && is_bytes(bytes, true) =>
        {
            Some("smollm")
        }
        [split, bytes] if is_bytes(bytes, false) => match regex(split) {
            Some(QWEN2) => Some("qwen2"),
            Some(QWEN35) => Some("qwen35"),
            Some(GPT_OSS) => Some("gpt-4o"),
            Some(TEKKEN) => Some("tekken"),
            Some(LLAMA3) if ignores_merges => Some("llama-bpe"),
            // The same split without Llama 3's `ignore_merges`.
            Some(LLAMA3) => Some("smaug-bpe"),
            _ => None,
        },
        _ => None,
    };
    match known {
        // In gpt-oss and Tekken merging the text of a token gives the token itself.
        Some(name @ ("llama-bpe" | "gpt-4o" | "tekken")) => Ok(name.into()),
        Some(name) if !ignores_merges => Ok(name.into()),
        _ => refuse(
            place,
            "pre_tokenizer: llama.cpp's name of this way to split texts is not known\n  hint: --pre NAME, one of \
             llama.cpp's (LLAMA_VOCAB_PRE_TYPE), if you know that it is the same",
        ),
    }
}

/// Texts with other tokens in llama.cpp.
pub(super) fn difference(name: &str) -> Option<&'static str> {
    ["tekken", "gpt-4o"].contains(&name).then_some(
        "llama.cpp splits letters from their combining marks here, as in Hindi, Bengali, Tamil and Thai: such texts \
         have other tokens than in training",
    )
}
