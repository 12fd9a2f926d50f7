//! What files beside `tokenizer.json` say: the chat template, special tokens, ids that end a text.

use super::error::Error;
use ft_base::store;
use minijinja::Value as Jinja;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// A chat template, and where it is from.
pub(super) struct TemplateSource {
    pub origin: String,
    pub default: String,
    /// The one for conversations with tools, where there is one of its own.
    pub tool_use: Option<String>,
}

/// The chat template of a model's folder, as text.
///
/// # Errors
/// A file that is there and cannot be used.
pub fn template_of(dir: &Path) -> Result<Option<String>, Error> {
    let path = dir.join("tokenizer_config.json");
    Ok(find_template(dir, None, &read_object(&path)?, &path)?.map(|t| t.default))
}

/// The chat template: the file that is given, a file of its own, or a key of the config.
pub(super) fn find_template(
    dir: &Path,
    given: Option<&Path>,
    config: &Map<String, Value>,
    config_path: &Path,
) -> Result<Option<TemplateSource>, Error> {
    let file = |path: &Path| -> Result<Option<TemplateSource>, Error> {
        let Some(bytes) = read(path)? else { return Ok(None) };
        let default = String::from_utf8(bytes)
            .map_err(|_| Error::Tokenizer { path: path.into(), message: "not UTF-8".into() })?;
        Ok(Some(TemplateSource { origin: path.display().to_string(), default, tool_use: None }))
    };
    if let Some(path) = given {
        return match file(path)? {
            Some(t) => Ok(Some(t)),
            None => {
                Err(Error::Missing { source_name: "data.chat_template".into(), path: path.to_path_buf() })
            }
        };
    }
    if let Some(t) = file(&dir.join("chat_template.jinja"))? {
        return Ok(Some(t));
    }
    let path = dir.join("chat_template.json");
    if let Some(t) = template_key(&read_object(&path)?, &path)? {
        return Ok(Some(t));
    }
    template_key(config, config_path)
}

/// The key `chat_template`: a template, or a list of named ones.
fn template_key(object: &Map<String, Value>, path: &Path) -> Result<Option<TemplateSource>, Error> {
    let origin = path.display().to_string();
    match object.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(s)) => Ok(Some(TemplateSource { origin, default: s.clone(), tool_use: None })),
        Some(Value::Array(list)) => {
            let named = |name: &str| {
                let entry = list.iter().find(|e| e.get("name").and_then(Value::as_str) == Some(name))?;
                entry.get("template").and_then(Value::as_str).map(String::from)
            };
            let default = named("default").ok_or_else(|| Error::Tokenizer {
                path: path.into(),
                message: "chat_template is a list without a template named \"default\"".into(),
            })?;
            Ok(Some(TemplateSource { origin, default, tool_use: named("tool_use") }))
        }
        Some(_) => Err(Error::Tokenizer {
            path: path.into(),
            message: "chat_template is neither a string nor a list".into(),
        }),
    }
}

/// `bos_token`, `eos_token` and their like, which templates use by name.
pub(super) fn collect_specials(object: &Map<String, Value>, out: &mut BTreeMap<String, Jinja>) {
    for (key, value) in object {
        let text = match value {
            Value::String(s) => Some(s.as_str()),
            Value::Object(o) => o.get("content").and_then(Value::as_str),
            _ => None,
        };
        if key.ends_with("_token")
            && let Some(text) = text
        {
            out.insert(key.clone(), Jinja::from(text));
        }
    }
}

/// Ids, be it one or a list.
pub(super) fn ids(value: Option<&Value>) -> Vec<u32> {
    let one = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(one).collect(),
        Some(v) => one(v).into_iter().collect(),
        None => Vec::new(),
    }
}

/// A file's bytes; none where there is no file.
pub(super) fn read(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match store::read_plain(path, store::LARGEST) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::Tokenizer { path: path.into(), message: format!("cannot be read: {e}") }),
    }
}

/// A JSON object from a file; empty when there is no file.
pub(super) fn read_object(path: &Path) -> Result<Map<String, Value>, Error> {
    let Some(bytes) = read(path)? else { return Ok(Map::new()) };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(Error::Tokenizer { path: path.into(), message: "not a JSON object".into() }),
        Err(e) => Err(Error::Tokenizer { path: path.into(), message: format!("not JSON: {e}") }),
    }
}
