//! Converts `tokenizer.json` to llama.cpp's keys: byte-level BPE as a token list, a merge list, and the
//! name of a pre-tokenizer; Gemma's BPE over characters, whose spaces are marks, as a token list with scores or merges.

use super::entries::Keys;
use super::error::{Error, refuse};
use crate::files::GgufValue;
use crate::model::Config;
use ft_base::store::{self};
use ft_base::terminal::warn;
use ft_data::Tokenizer;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::Path;

/// llama.cpp's token types.
mod token {
    pub const NORMAL: i32 = 1;
    pub const UNKNOWN: i32 = 2;
    pub const CONTROL: i32 = 3;
    pub const USER_DEFINED: i32 = 4;
    pub const UNUSED: i32 = 5;
    pub const BYTE: i32 = 6;
}

/// Pre-tokenizer regex of Llama 3.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Pre-tokenizer regex of Qwen 2 and 3.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Pre-tokenizer regex of Qwen 3.5.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Pre-tokenizer regex of gpt-oss.
const GPT_OSS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Special tokens: names in tokenizer_config.json and in GGUF keys ("seperator" is llama.cpp's spelling).
const SPECIALS: [(&str, &str); 7] = [
    ("bos", "bos"),
    ("eos", "eos"),
    ("unk", "unknown"),
    ("sep", "seperator"),
    ("pad", "padding"),
    ("cls", "cls"),
    ("mask", "mask"),
];

/// Whether a tokenizer works on bytes; `byte_fallback` then says nothing.
fn is_byte_level(file: &Map<String, Value>) -> bool {
    let holds = |part: &str| file.get(part).is_some_and(|v| v.to_string().contains("\"ByteLevel\""));
    holds("pre_tokenizer") && holds("decoder")
}

/// Tokenizer keys of a model. Without a tokenizer, warns and writes a file without a vocabulary.
///
/// # Errors
/// A tokenizer not supported by llama.cpp, or an unrecognized pre-tokenizer.
pub(super) fn keys(dir: &Path, config: &Config, pre: Option<&str>) -> ft_base::Result<Keys> {
    let Some(loaded) = Tokenizer::load(dir, None)? else {
        warn("the model has no tokenizer.json: the file has no vocabulary");
        return Ok(vec![("tokenizer.ggml.model".into(), "none".into())]);
    };
    let path = dir.join("tokenizer.json");
    let file = object(dir, "tokenizer.json")?;
    let place = path.display().to_string();
    let model = file.get("model").unwrap_or(&Value::Null);
    let marks = !is_byte_level(&file) && model["byte_fallback"] == true && marks_spaces(&file);
    if model["type"] != "BPE" || (model["byte_fallback"] == true && !is_byte_level(&file) && !marks) {
        let why =
            "no byte-level BPE, nor Gemma's: not built yet\n  hint: llama.cpp's own conversion takes it";
        return Ok(refuse(place, why)?);
    }
    let (tokens, types) = vocabulary(&place, &file, config.vocab)?;
    let mut out: Keys = vec![
        ("tokenizer.ggml.tokens".into(), GgufValue::Texts(tokens.clone())),
        ("tokenizer.ggml.token_type".into(), GgufValue::I32s(types)),
    ];
    let mut put = |key: &str, value: GgufValue| out.push((format!("tokenizer.ggml.{key}"), value));
    match (marks, config.family.model_type) {
        (false, _) => {
            put("model", "gpt2".into());
            put("pre", GgufValue::Text(pre.map_or_else(|| pre_tokenizer(&place, &file), |n| Ok(n.into()))?));
            put("merges", GgufValue::Texts(merges(&place, model)?));
        }
        (true, "gemma4_text") => {
            put("model", "gemma4".into());
            put("merges", GgufValue::Texts(merges(&place, model)?));
            put("add_space_prefix", GgufValue::Bool(false));
        }
        (true, _) => {
            put("model", "llama".into());
            put("scores", GgufValue::F32s(scores(&tokens, &merges(&place, model)?)));
            put("add_space_prefix", GgufValue::Bool(false));
        }
    }
    let (specials, eos) = specials(dir, config, &file)?;
    out.extend(specials);
    let bos = loaded.text_start();
    out.push(("tokenizer.ggml.add_bos_token".into(), GgufValue::Bool(!bos.is_empty())));
    let template = ft_data::template_of(dir)?;
    // If turns in the chat template end with a token other than EOS.
    let in_template = |id: u32| {
        tokens.get(id as usize).zip(template.as_ref()).is_some_and(|(token, t)| t.contains(token.as_str()))
    };
    if !eos.is_some_and(in_template)
        && let Some(id) = loaded.eos().iter().find(|id| Some(**id) != eos && in_template(**id))
    {
        out.push(("tokenizer.ggml.eot_token_id".into(), GgufValue::U32(*id)));
    }
    if let Some(template) = template {
        out.push(("tokenizer.chat_template".into(), GgufValue::Text(template)));
    }
    Ok(out)
}

/// Keys of the special tokens, and the end-of-sequence token.
fn specials(dir: &Path, config: &Config, file: &Map<String, Value>) -> ft_base::Result<(Keys, Option<u32>)> {
    let mut out = Keys::new();
    let described = object(dir, "tokenizer_config.json")?;
    let added: Vec<(&str, u64)> =
        entries(file).filter_map(|t| Some((t["content"].as_str()?, t["id"].as_u64()?))).collect();
    let mut eos = None;
    for (kind, key) in SPECIALS {
        let named = described.get(&format!("{kind}_token")).unwrap_or(&Value::Null);
        let text = named.as_str().or_else(|| named["content"].as_str());
        let id = text.and_then(|t| Some(added.iter().find(|a| a.0 == t)?.1));
        let id = id.or_else(|| config.key(&format!("{kind}_token_id")).and_then(Value::as_u64));
        if let Some(id) = id {
            out.push((format!("tokenizer.ggml.{key}_token_id"), GgufValue::U32(id as u32)));
            eos = if kind == "eos" { Some(id as u32) } else { eos };
        }
    }
    Ok((out, eos))
}

/// Whether spaces are marks from the start, and nothing else is changed or split: Gemma's BPE.
fn marks_spaces(file: &Map<String, Value>) -> bool {
    let part = |name: &str| file.get(name).unwrap_or(&Value::Null);
    let (normalizer, pre) = (part("normalizer"), part("pre_tokenizer"));
    let marks = normalizer["type"] == "Replace"
        && normalizer["pattern"]["String"] == " "
        && normalizer["content"] == "\u{2581}";
    // No space is left to split at.
    let whole = pre.is_null() || (pre["type"] == "Split" && pre["pattern"]["String"] == " ");
    marks && whole
}

/// Scores of llama.cpp's SentencePiece: what merges first has the highest.
fn scores(tokens: &[String], merges: &[String]) -> Vec<f32> {
    let mut first: HashMap<String, usize> = HashMap::new();
    for (rank, merge) in merges.iter().enumerate() {
        // A part may begin with a space of its own, and none ends with one.
        if let Some(at) = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at) {
            first.entry([&merge[..at], &merge[at + 1..]].concat()).or_insert(rank);
        }
    }
    tokens.iter().map(|t| -(*first.get(t).unwrap_or(&merges.len()) as f32)).collect()
}

fn object(dir: &Path, name: &str) -> ft_base::Result<Map<String, Value>> {
    let Some(bytes) = store::read_if_there(dir, name, store::LARGEST)? else { return Ok(Map::new()) };
    serde_json::from_slice(&bytes)
        .map_err(|e| Error { place: dir.join(name).display().to_string(), why: e.to_string() }.into())
}

fn entries(file: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    file.get("added_tokens").and_then(Value::as_array).into_iter().flatten()
}

/// llama.cpp's name of the pre-tokenizer.
fn pre_tokenizer(place: &str, file: &Map<String, Value>) -> Result<String, Error> {
    let pre = file.get("pre_tokenizer").unwrap_or(&Value::Null);
    let alone = std::slice::from_ref(pre);
    let steps = pre["pretokenizers"].as_array().map_or(alone, Vec::as_slice);
    // Steps without an effect on the split: the last step of Qwen and Llama 3 only maps bytes to
    // characters.
    let plain = |step: &Value| step["add_prefix_space"] != true;
    let is = |step: &Value, kind: &str| step["type"] == kind;
    let ignores_merges = file.get("model").is_some_and(|m| m["ignore_merges"] == true);
    let known = match steps {
        [bytes] if is(bytes, "ByteLevel") && plain(bytes) && bytes["use_regex"] != false => Some("gpt-2"),
        [digits, bytes]
            if is(digits, "Digits")
                && digits["individual_digits"] == true
                && is(bytes, "ByteLevel")
                && plain(bytes)
                && bytes["use_regex"] != false =>
        {
            Some("smollm")
        }
        [split, bytes]
            if is(split, "Split")
                && split["behavior"] == "Isolated"
                && split["invert"] != true
                && is(bytes, "ByteLevel")
                && plain(bytes)
                && bytes["use_regex"] == false =>
        {
            match split["pattern"]["Regex"].as_str() {
                Some(QWEN2) => Some("qwen2"),
                Some(QWEN35) => Some("qwen35"),
                Some(GPT_OSS) => Some("gpt-4o"),
                Some(LLAMA3) if ignores_merges => Some("llama-bpe"),
                // The same split without Llama 3's `ignore_merges`.
                Some(LLAMA3) => Some("smaug-bpe"),
                _ => None,
            }
        }
        _ => None,
    };
    match known {
        // gpt-oss: merging the text of a token gives the token itself.
        Some(name @ ("llama-bpe" | "gpt-4o")) => Ok(name.into()),
        Some(name) if !ignores_merges => Ok(name.into()),
        _ => refuse(
            place,
            "pre_tokenizer: llama.cpp's name of this way to split texts is not known\n  hint: --pre NAME, one of \
             llama.cpp's (LLAMA_VOCAB_PRE_TYPE), if you know that it is the same",
        ),
    }
}

/// Strings and types of all tokens, one per embedding row.
fn vocabulary(place: &str, file: &Map<String, Value>, size: usize) -> Result<(Vec<String>, Vec<i32>), Error> {
    let mut tokens: Vec<Option<(String, i32)>> = vec![None; size];
    let own = file.get("model").and_then(|m| m["vocab"].as_object());
    let falls_back = file.get("model").is_some_and(|m| m["byte_fallback"] == true);
    let unknown = file.get("model").and_then(|m| m["unk_token"].as_str()).filter(|_| falls_back);
    let kind = |text: &str| match text.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')) {
        Some(hex) if falls_back && hex.len() == 2 && u8::from_str_radix(hex, 16).is_ok() => token::BYTE,
        _ => token::NORMAL,
    };
    let own = own.into_iter().flatten().map(|(t, id)| (t.as_str(), id.as_u64(), kind(t)));
    let added = entries(file).map(|t| {
        let text = t["content"].as_str().unwrap_or_default();
        let control = t["special"] == true || looks_special(text);
        let kind = match control {
            _ if Some(text) == unknown => token::UNKNOWN,
            true => token::CONTROL,
            false => token::USER_DEFINED,
        };
        (text, t["id"].as_u64(), kind)
    });
    for (text, id, kind) in own.chain(added) {
        let slot = id.and_then(|id| tokens.get_mut(usize::try_from(id).ok()?));
        let Some(slot) = slot else {
            return refuse(
                place,
                format!("token {text:?}: the embedding has {size} rows, and its id is {id:?}"),
            );
        };
        *slot = Some((text.to_string(), kind));
    }
    let padded = |(i, t): (usize, Option<(String, i32)>)| t.unwrap_or((format!("[PAD{i}]"), token::UNUSED));
    Ok(tokens.into_iter().enumerate().map(padded).unzip())
}

/// Control tokens not marked as special by some tokenizers.
fn looks_special(text: &str) -> bool {
    ["<pad>", "<mask>"].contains(&text) || (text.starts_with("<|") && text.ends_with("|>"))
}

/// Merges as `left right`, from either format of tokenizer.json.
fn merges(place: &str, model: &Value) -> Result<Vec<String>, Error> {
    let spelled = |m: &Value| match m {
        Value::String(s) => Some(s.clone()),
        Value::Array(pair) => match &pair[..] {
            [Value::String(a), Value::String(b)] => {
                // A space inside a part becomes its byte-level character.
                let part = |s: &str| s.replace(' ', "\u{120}");
                Some(format!("{} {}", part(a), part(b)))
            }
            _ => None,
        },
        _ => None,
    };
    let list = model["merges"].as_array().map(Vec::as_slice).unwrap_or_default();
    list.iter()
        .map(|m| spelled(m).ok_or_else(|| Error { place: place.into(), why: format!("model.merges: {m}") }))
        .collect()
}
