//! Files next to `tokenizer.json`: chat template, special tokens, end-of-sequence ids.

use crate::error::Error;
use ft_base::store;
use minijinja::Value as Jinja;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

const CONFIG: &str = "tokenizer_config.json";
/// Key of the end-of-sequence ids.
const EOS: &str = "eos_token_id";
/// Chat template of a model or adapter folder; the first file that transformers looks for.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
const TEMPLATES: [&str; 2] = [CHAT_TEMPLATE, "chat_template.json"];
/// Template for conversations with tools, in a folder with [`CHAT_TEMPLATE`].
pub const TOOL_USE: &str = "additional_chat_templates/tool_use.jinja";

/// Contents of the files next to `tokenizer.json`.
pub(super) struct ModelFiles {
    /// Special tokens by name (`eos_token` etc.), as template variables.
    pub specials: BTreeMap<String, Jinja>,
    pub template: Option<TemplateSource>,
    /// End-of-sequence ids of the model, in order, within the vocabulary.
    pub eos: Vec<u32>,
}

impl ModelFiles {
    /// Reads the files of folder `dir`; `given` is an explicit template file.
    ///
    /// # Errors
    /// Existing files that are invalid.
    pub fn read(dir: &Path, given: Option<&Path>) -> Result<Self, Error> {
        let config = read_object(dir, CONFIG)?;
        let mut specials = BTreeMap::new();
        for source in [&read_object(dir, "special_tokens_map.json")?, &config] {
            collect_specials(source, &mut specials);
        }
        let template = find_template(dir, given, &config)?;
        let (generation, model) =
            (read_object(dir, "generation_config.json")?, read_object(dir, "config.json")?);
        // The text model of a vision checkpoint.
        let of_text = |key: &str| model.get("text_config").and_then(|text| text.get(key));
        let vocab = of_text("vocab_size").or(model.get("vocab_size")).and_then(Value::as_u64);
        let named = [generation.get(EOS), model.get(EOS), of_text(EOS)].into_iter().flat_map(ids);
        let eos = named.filter(|id| vocab.is_none_or(|vocab| u64::from(*id) < vocab)).collect();
        Ok(Self { specials, template, eos })
    }
}

/// Text and origin of a chat template.
pub struct TemplateSource {
    /// Path of the file.
    pub origin: String,
    /// The template.
    pub default: String,
    /// A separate template for conversations with tools, if any.
    pub tool_use: Option<String>,
}

/// The chat template of a model folder.
///
/// # Errors
/// Existing files that are invalid.
pub fn template_of(dir: &Path) -> Result<Option<TemplateSource>, Error> {
    find_template(dir, None, &read_object(dir, CONFIG)?)
}

/// Finds the chat template: the explicit file, or its key in a file of a tokenizer; a template file of the folder; a
/// config key.
fn find_template(
    dir: &Path,
    given: Option<&Path>,
    config: &Map<String, Value>,
) -> Result<Option<TemplateSource>, Error> {
    let utf8 = |path: &Path, bytes: Vec<u8>| {
        String::from_utf8(bytes).map_err(|_| Error::tokenizer(path, "not UTF-8"))
    };
    let source =
        |path: &Path, bytes: Vec<u8>, folders: [Option<&Path>; 2]| -> Result<TemplateSource, Error> {
            let mut folders = folders.into_iter().flatten();
            let tool_use = folders.find_map(|dir| Some((dir, read(dir, TOOL_USE).transpose()?)));
            let tool_use = tool_use.map(|(dir, bytes)| utf8(&dir.join(TOOL_USE), bytes?)).transpose()?;
            Ok(TemplateSource { origin: path.display().to_string(), default: utf8(path, bytes)?, tool_use })
        };
    if let Some(path) = given {
        let bytes = store::read_plain(path, store::LARGEST).map_err(|e| match e.kind() {
            ErrorKind::NotFound => {
                Error::Missing { source_name: "data.chat_template".into(), path: path.into() }
            }
            _ => Error::tokenizer(path, format!("cannot be read: {e}")),
        })?;
        if path.file_name().is_some_and(|name| name == CONFIG || name == TEMPLATES[1]) {
            return template_key(&object(path, &bytes)?, path);
        }
        // an adapter has a template for tools beside its own, or a copy of the model's template
        let is_own = read(dir, TEMPLATES[0])?.is_some_and(|own| own == bytes);
        return source(path, bytes, [folder_of_template(path), is_own.then_some(dir)]).map(Some);
    }
    if let Some(bytes) = read(dir, TEMPLATES[0])? {
        return source(&dir.join(TEMPLATES[0]), bytes, [Some(dir), None]).map(Some);
    }
    if let Some(t) = template_key(&read_object(dir, TEMPLATES[1])?, &dir.join(TEMPLATES[1]))? {
        return Ok(Some(t));
    }
    template_key(config, &dir.join(CONFIG))
}

/// The folder of a given template that may have [`TOOL_USE`] too: that of a model or adapter, by the name of the file.
pub(super) fn folder_of_template(given: &Path) -> Option<&Path> {
    given.file_name().is_some_and(|name| name == TEMPLATES[0]).then(|| store::folder_of(given))
}

/// Reads the key `chat_template`: a template, or a list of named templates.
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
            let default = named("default").ok_or_else(|| {
                Error::tokenizer(path, "chat_template is a list without a template named \"default\"")
            })?;
            Ok(Some(TemplateSource { origin, default, tool_use: named("tool_use") }))
        }
        Some(_) => Err(Error::tokenizer(path, "chat_template is neither a string nor a list")),
    }
}

/// Collects `bos_token`, `eos_token` etc. as template variables.
fn collect_specials(object: &Map<String, Value>, out: &mut BTreeMap<String, Jinja>) {
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

/// Ids from a single number or a list.
fn ids(value: Option<&Value>) -> Vec<u32> {
    let one = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(one).collect(),
        Some(v) => one(v).into_iter().collect(),
        None => Vec::new(),
    }
}

/// Reads a file of a model folder; `None` if missing.
pub(super) fn read(dir: &Path, name: &str) -> Result<Option<Vec<u8>>, Error> {
    Ok(store::read_if_there(dir, name, store::LARGEST)?)
}

/// Reads a JSON object from a file of a model folder; empty if missing.
fn read_object(dir: &Path, name: &str) -> Result<Map<String, Value>, Error> {
    read(dir, name)?.map_or(Ok(Map::new()), |bytes| object(&dir.join(name), &bytes))
}

/// Parses a JSON object of a file.
fn object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, Error> {
    let fail = |why: String| Error::tokenizer(path, why);
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(fail("not a JSON object".into())),
        Err(e) => Err(fail(format!("not JSON: {e}"))),
    }
}
