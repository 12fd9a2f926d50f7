//! Converts `tokenizer.json` to llama.cpp's keys: byte-level BPE as a token list, a merge list, and the
//! name of a pre-tokenizer; BPE over characters, with marks for spaces, as a token list with scores or merges.

mod marks;
mod pre;
mod strips;

use super::entries::Keys;
use super::keys::object;
use super::{Error, refuse};
use crate::files::GgufValue;
use crate::model::Config;
use ft_base::terminal::warn;
use ft_data::{TemplateSource, Tokenizer};
use marks::Prefix;
use pre::pre_tokenizer;
use serde_json::{Map, Value};
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

/// Tokenizers that llama.cpp has.
#[derive(Clone, Copy)]
enum Kind {
    /// BPE over bytes.
    Bytes,
    /// BPE over characters, with marks for spaces.
    Marks(Prefix),
}

impl Kind {
    fn of(place: &str, file: &Map<String, Value>) -> Result<Self, Error> {
        let model = file.get("model").unwrap_or(&Value::Null);
        if model["type"] == "BPE" && (is_byte_level(file) || model["byte_fallback"] != true) {
            return Ok(Kind::Bytes);
        }
        match marks::prefix(file).filter(|_| model["type"] == "BPE") {
            Some(prefix) => marks::check(place, file).map(|()| Kind::Marks(prefix)),
            None => refuse(
                place,
                "neither byte-level BPE nor SentencePiece's BPE (model, normalizer, pre_tokenizer): not built yet\n  \
                 hint: llama.cpp's own conversion takes it",
            ),
        }
    }
}

/// Name of the model for the file, and the tokenizer keys, by which llama.cpp reads texts. Without a tokenizer, warns
/// and leaves the vocabulary out.
///
/// # Errors
/// A tokenizer not supported by llama.cpp, or an unrecognized pre-tokenizer.
pub(super) fn keys(
    dir: &Path,
    config: &Config,
    (name, pre): (&str, Option<&str>),
) -> ft_base::Result<(String, Keys)> {
    let file = object(dir, "tokenizer.json")?;
    Ok((strips::title(name, &file), keys_of(dir, &file, config, pre)?))
}

fn keys_of(
    dir: &Path,
    file: &Map<String, Value>,
    config: &Config,
    pre: Option<&str>,
) -> ft_base::Result<Keys> {
    let Some(loaded) = Tokenizer::load(dir, None)? else {
        warn("the model has no tokenizer.json: the file has no vocabulary");
        return Ok(vec![("tokenizer.ggml.model".into(), "none".into())]);
    };
    let place = dir.join("tokenizer.json").display().to_string();
    let kind = Kind::of(&place, file)?;
    let templates = ft_data::template_of(dir)?;
    let template = templates.as_ref().map(|t| t.default.as_str());
    let (tokens, types) = vocabulary(&place, file, config.vocab)?;
    let model = file.get("model").unwrap_or(&Value::Null);
    let merges = merges(&place, model)?;
    let mut out: Keys = vec![
        ("tokenizer.ggml.tokens".into(), GgufValue::Texts(tokens.clone())),
        ("tokenizer.ggml.token_type".into(), GgufValue::I32s(types)),
    ];
    let mut put = |key: &str, value: GgufValue| out.push((format!("tokenizer.ggml.{key}"), value));
    match (kind, config.family.model_type) {
        (Kind::Bytes, _) => {
            put("model", "gpt2".into());
            let pre = pre.map_or_else(|| pre_tokenizer(&place, file), |n| Ok(n.into()))?;
            pre::difference(&pre).into_iter().for_each(warn);
            put("pre", GgufValue::Text(pre));
            put("merges", GgufValue::Texts(merges));
        }
        (Kind::Marks(prefix), family) => {
            if family == "gemma4_text" {
                put("model", "gemma4".into());
                put("merges", GgufValue::Texts(merges));
            } else {
                put("model", "llama".into());
                put("scores", GgufValue::F32s(marks::scores(&tokens, &merges)));
            }
            put("add_space_prefix", GgufValue::Bool(prefix.in_llama_cpp(template.is_some())));
            prefix.difference(template.is_some()).into_iter().for_each(warn);
        }
    }
    warn_of_spaces(file);
    let (specials, eos) = specials(dir, config, file)?;
    out.extend(specials);
    out.push(("tokenizer.ggml.add_bos_token".into(), GgufValue::Bool(adds_bos(&loaded))));
    // If turns in the chat template end with a token other than EOS.
    let in_template =
        |id: u32| tokens.get(id as usize).zip(template).is_some_and(|(token, t)| t.contains(token.as_str()));
    if !eos.is_some_and(in_template)
        && let Some(id) = loaded.eos().iter().find(|id| Some(**id) != eos && in_template(**id))
    {
        out.push(("tokenizer.ggml.eot_token_id".into(), GgufValue::U32(*id)));
    }
    out.extend(templates.into_iter().flat_map(of_templates));
    Ok(out)
}

/// Keys of the chat template, and of another one for conversations with tools.
fn of_templates(templates: TemplateSource) -> Keys {
    let mut out: Keys = vec![("tokenizer.chat_template".into(), GgufValue::Text(templates.default))];
    if let Some(tool_use) = templates.tool_use {
        out.push(("tokenizer.chat_template.tool_use".into(), GgufValue::Text(tool_use)));
        out.push(("tokenizer.chat_templates".into(), GgufValue::Texts(vec!["tool_use".into()])));
    }
    out
}

/// Whether llama.cpp puts a token before a plain text. It cannot put several.
fn adds_bos(tokenizer: &Tokenizer) -> bool {
    let start = tokenizer.text_start();
    if start.len() > 1 {
        warn(&format!(
            "the tokenizer puts {} tokens before a plain text, llama.cpp with this file none: prompts need them",
            start.len()
        ));
    }
    start.len() == 1
}

/// Warns of tokens taking spaces in training alone.
fn warn_of_spaces(file: &Map<String, Value>) {
    if let [first, others @ ..] = &strips::unstripped(file)[..] {
        let others = and_more(others.len());
        warn(&format!(
            "added_tokens: {first:?}{others} take the spaces around them (lstrip, rstrip), and in llama.cpp do not"
        ));
    }
}

/// Number of further tokens of a list, for a warning.
fn and_more(others: usize) -> String {
    if others == 0 { String::new() } else { format!(" and {others} more") }
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
            if let Some((token, _)) = added.iter().find(|a| a.1 == id && id >= config.vocab as u64) {
                let place = dir.join("tokenizer.json").display().to_string();
                refuse::<()>(place, no_row(token, Some(id), config.vocab))?;
            }
            out.push((format!("tokenizer.ggml.{key}_token_id"), GgufValue::U32(id as u32)));
            eos = if kind == "eos" { Some(id as u32) } else { eos };
        }
    }
    Ok((out, eos))
}

fn entries(file: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    file.get("added_tokens").and_then(Value::as_array).into_iter().flatten()
}

/// Error for a token beyond the embedding.
fn no_row(token: &str, id: Option<u64>, rows: usize) -> String {
    format!("token {token:?}: the embedding has {rows} rows, and its id is {id:?}")
}

/// Strings and types of all tokens, one per embedding row. Warns of added tokens without a row, and leaves them out.
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
    let (added, rowless): (Vec<_>, Vec<_>) =
        added.partition(|(_, id, _)| id.is_none_or(|id| id < size as u64));
    if let [(first, ..), others @ ..] = &rowless[..] {
        let others = and_more(others.len());
        warn(&format!(
            "added_tokens: {first:?}{others} left out: the ids are beyond the {size} rows of the embedding"
        ));
    }
    for (text, id, kind) in own.chain(added) {
        let slot = id.and_then(|id| tokens.get_mut(usize::try_from(id).ok()?));
        let Some(slot) = slot else {
            return refuse(place, no_row(text, id, size));
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
    // A space inside a part becomes its byte-level character.
    let part = |v: &Value| Some(v.as_str()?.replace(' ', "\u{120}"));
    let spelled = |m: &Value| match (m, m.as_array().map(Vec::as_slice)) {
        (Value::String(s), _) => Some(s.clone()),
        (_, Some([a, b])) => Some(format!("{} {}", part(a)?, part(b)?)),
        _ => None,
    };
    let list = model["merges"].as_array().map(Vec::as_slice).unwrap_or_default();
    list.iter()
        .map(|m| spelled(m).ok_or_else(|| Error { place: place.into(), why: format!("model.merges: {m}") }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context as _, Result};
    use serde_json::json;

    fn map(value: &Value) -> Result<Map<String, Value>> {
        Ok(value.as_object().context("an object")?.clone())
    }

    /// Gemma 3's text models have `<image_soft_token>` beyond the embedding. llama.cpp's conversion leaves it out.
    #[test]
    fn added_tokens_without_a_row_are_left_out() -> Result<()> {
        let file = |last: u64| {
            map(&json!({
                "model": {"vocab": {"a": 0, "b": last}},
                "added_tokens": [{"content": "<c>", "id": 2, "special": true},
                    {"content": "<image>", "id": 3, "special": true}],
            }))
        };
        let (tokens, types) = vocabulary("f", &file(1)?, 3)?;
        assert_eq!(tokens, ["a", "b", "<c>"]);
        assert_eq!(types, [token::NORMAL, token::NORMAL, token::CONTROL]);
        let e = vocabulary("f", &file(3)?, 3).err().context("refused")?.to_string();
        assert!(e.contains("token \"b\": the embedding has 3 rows"), "{e}");
        // A special token needs its row.
        let dir = tempfile::tempdir()?;
        let config = Config::parse("config.json", map(&json!({"model_type": "qwen3", "vocab_size": 3}))?)?;
        for (eos, is_refused) in [("<c>", false), ("<image>", true)] {
            std::fs::write(dir.path().join("tokenizer_config.json"), json!({"eos_token": eos}).to_string())?;
            let e = specials(dir.path(), &config, &file(1)?).err().map(|e| e.to_string());
            assert_eq!(e.is_some_and(|e| e.contains("token \"<image>\"")), is_refused, "{eos}");
        }
        Ok(())
    }
}
