//! Tokens that a tokenizer gets beside its own: those that a recipe trains and it does not have, and those of an adapter.

use super::beside::read;
use super::error::Error;
use serde_json::{Value, json};
use std::path::Path;

/// Tokens to add where they are missing, each with its number where that is known; else it is the next, as transformers'
/// `add_tokens` numbers them.
#[derive(Clone, Debug, Default)]
pub struct Added(Vec<(String, Option<u32>)>);

impl Added {
    /// Those that an adapter's own tokenizer has, if it has one.
    ///
    /// # Errors
    /// A `tokenizer.json` that is none.
    pub fn of_adapter(dir: &Path) -> Result<Self, Error> {
        let path = dir.join("tokenizer.json");
        let Some(bytes) = read(&path)? else { return Ok(Self::default()) };
        let file: Value = serde_json::from_slice(&bytes)
            .map_err(|e| Error::Tokenizer { path, message: format!("not a tokenizer: {e}") })?;
        let mut all: Vec<(u32, String)> =
            entries(&file).filter_map(|(text, id)| Some((id?, text.to_string()))).collect();
        all.sort_unstable();
        Ok(Self(all.into_iter().map(|(id, text)| (text, Some(id))).collect()))
    }

    /// With these too.
    pub fn and<'a>(mut self, texts: impl IntoIterator<Item = &'a str>) -> Self {
        self.0.extend(texts.into_iter().map(|t| (t.to_string(), None)));
        self
    }

    /// A `tokenizer.json` with them, and which these are; nothing where it has them all.
    ///
    /// # Errors
    /// A file that is none; a token that has another number there.
    pub(super) fn to(&self, bytes: &[u8]) -> Result<Option<(Vec<u8>, Vec<(String, u32)>)>, String> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let mut file: Value = serde_json::from_slice(bytes).map_err(|e| format!("not a tokenizer: {e}"))?;
        if !file.is_object() {
            return Err("not a tokenizer: a JSON object is wanted".into());
        }
        let mut new: Vec<(String, u32)> = Vec::new();
        for (text, wanted) in &self.0 {
            let known = number(&file, text);
            let id = known.unwrap_or_else(|| next(&file));
            if wanted.is_some_and(|wanted| wanted != id) {
                return Err(format!(
                    "{text:?} is token {id} here, and {} to the adapter",
                    wanted.unwrap_or(id)
                ));
            }
            if known.is_some() {
                continue;
            }
            // as Qwen's own <think> is: found as it is written, and shown
            let entry = json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                               "normalized": false, "special": false});
            if !file["added_tokens"].is_array() {
                file["added_tokens"] = json!([]);
            }
            if let Some(list) = file["added_tokens"].as_array_mut() {
                list.push(entry);
            }
            new.push((text.clone(), id));
        }
        Ok((!new.is_empty()).then(|| (file.to_string().into_bytes(), new)))
    }
}

/// Tokens beside the model's own.
fn entries(file: &Value) -> impl Iterator<Item = (&str, Option<u32>)> {
    let list = file["added_tokens"].as_array().into_iter().flatten();
    list.filter_map(|t| {
        Some((t["content"].as_str()?, t["id"].as_u64().and_then(|id| u32::try_from(id).ok())))
    })
}

/// The number of a token, if it is there.
fn number(file: &Value, text: &str) -> Option<u32> {
    if let Some((_, id)) = entries(file).find(|(t, _)| *t == text) {
        return id;
    }
    let at = match &file["model"]["vocab"] {
        Value::Object(map) => map.get(text)?.as_u64(),
        Value::Array(list) => list.iter().position(|t| t[0].as_str() == Some(text)).map(|i| i as u64),
        _ => None,
    };
    at.and_then(|id| u32::try_from(id).ok())
}

/// The number that comes next, as the library counts.
fn next(file: &Value) -> u32 {
    let vocab = match &file["model"]["vocab"] {
        Value::Object(map) => map.len(),
        Value::Array(list) => list.len(),
        _ => 0,
    };
    let vocab = u32::try_from(vocab).unwrap_or(u32::MAX);
    match entries(file).filter_map(|(_, id)| id).max() {
        Some(last) if last >= vocab || vocab == 0 => last.saturating_add(1),
        _ => vocab,
    }
}
