//! Tokens added to a tokenizer: new tokens trained by a recipe, and tokens of an adapter.

use super::model_files::read;
use crate::error::Error;
use serde_json::{Value, json};
use std::path::Path;

/// Tokens to add if missing, as entries of `added_tokens`. Tokens without an id get the next free one, like
/// transformers' `add_tokens`.
#[derive(Clone, Debug, Default)]
pub struct Added(Vec<Value>);

/// An extended `tokenizer.json`, and the new tokens with ids.
pub type Extended = (Vec<u8>, Vec<(String, u32)>);

impl Added {
    /// The added tokens of an adapter's own tokenizer, if any.
    ///
    /// # Errors
    /// An invalid `tokenizer.json`.
    pub fn of_adapter(dir: &Path) -> Result<Self, Error> {
        let path = dir.join("tokenizer.json");
        let Some(bytes) = read(dir, "tokenizer.json")? else { return Ok(Self::default()) };
        let file: Value = serde_json::from_slice(&bytes)
            .map_err(|e| Error::tokenizer(&path, format!("not a tokenizer: {e}")))?;
        let mut all: Vec<Value> = file["added_tokens"].as_array().cloned().unwrap_or_default();
        all.sort_by_key(id);
        Ok(Self(all))
    }

    /// Appends new tokens without ids.
    pub fn and<'a>(mut self, texts: impl IntoIterator<Item = &'a str>) -> Self {
        // same flags as Qwen's own <think>: matched verbatim, visible in decoded text
        let entry = |text: &str| {
            json!({"id": null, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": false})
        };
        self.0.extend(texts.into_iter().map(entry));
        self
    }

    /// Extends a `tokenizer.json`; `None` if no token is missing.
    ///
    /// # Errors
    /// An invalid file, or a token with a conflicting id.
    pub(crate) fn to(&self, bytes: &[u8]) -> Result<Option<Extended>, String> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let mut file: Value = serde_json::from_slice(bytes).map_err(|e| format!("not a tokenizer: {e}"))?;
        if !file.is_object() {
            return Err("not a tokenizer: a JSON object is wanted".into());
        }
        let mut new: Vec<(String, u32)> = Vec::new();
        for entry in &self.0 {
            let Some(text) = entry["content"].as_str() else { continue };
            let known = number(&file, text);
            let here = known.unwrap_or_else(|| next(&file));
            if let Some(there) = id(entry).filter(|there| *there != here) {
                return Err(format!("{text:?} is token {here} here, and {there} to the adapter"));
            }
            if known.is_some() {
                continue;
            }
            let mut entry = entry.clone();
            entry["id"] = json!(here);
            match file["added_tokens"].as_array_mut() {
                Some(list) => list.push(entry),
                None => file["added_tokens"] = json!([entry]),
            }
            new.push((text.to_string(), here));
        }
        Ok((!new.is_empty()).then(|| (file.to_string().into_bytes(), new)))
    }
}

/// The id of an entry.
fn id(entry: &Value) -> Option<u32> {
    entry["id"].as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Added tokens of a tokenizer file.
fn entries(file: &Value) -> impl Iterator<Item = (&str, Option<u32>)> {
    let list = file["added_tokens"].as_array().into_iter().flatten();
    list.filter_map(|t| Some((t["content"].as_str()?, id(t))))
}

/// The id of a token, if present.
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

/// The next free id, by the library's rule.
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
