//! A model's tokenizer and chat template, from its folder.

use super::error::Error;
use super::template::{Template, Variables};
use minijinja::Value as Jinja;
use minijinja::value::Serde;
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Text to token ids and back, conversations to text.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    template: Option<Template>,
    specials: Variables,
    eos: Vec<u32>,
    text_end: Option<u32>,
    text_start: Vec<u32>,
    hash: String,
    /// The text of the template file that was named.
    given: Option<String>,
    /// Tokens beside the model's own, which stand for themselves.
    added: HashSet<u32>,
}

/// Token ids, and for each the bytes of the text that it stands for.
pub(super) struct Encoded {
    pub ids: Vec<u32>,
    pub offsets: Vec<(usize, usize)>,
}

impl Tokenizer {
    /// Reads the tokenizer of the model folder `dir`; `None` when it has no `tokenizer.json`.
    ///
    /// The chat template is `chat_template` if given, else `chat_template.jinja`, `chat_template.json`, or the key
    /// of `tokenizer_config.json`, in transformers' order. End-of-sequence ids come from `generation_config.json`,
    /// `config.json` and `tokenizer_config.json`.
    ///
    /// # Errors
    /// A file that is there and cannot be used.
    pub fn load(dir: &Path, chat_template: Option<&Path>) -> Result<Option<Self>, Error> {
        let path = dir.join("tokenizer.json");
        let Some(bytes) = read(&path)? else { return Ok(None) };
        let bad = |message: String| Error::Tokenizer { path: path.clone(), message };
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|e| bad(e.to_string()))?;
        // A stored truncation or padding would cut samples behind our back.
        inner.with_truncation(None).map_err(|e| bad(e.to_string()))?;
        inner.with_padding(None);
        let text_start = text_start(&inner).map_err(&bad)?;
        // Post-processors add special tokens, which we do by name, and trim offsets, which would move masks.
        inner.with_post_processor(None::<tokenizers::PostProcessorWrapper>);

        let config_path = dir.join("tokenizer_config.json");
        let config = read_object(&config_path)?;
        let mut specials = Variables::new();
        for source in [&read_object(&dir.join("special_tokens_map.json"))?, &config] {
            collect_specials(source, &mut specials);
        }
        let source = find_template(dir, chat_template, &config, &config_path)?;
        let given = source.as_ref().filter(|_| chat_template.is_some()).map(|s| s.default.clone());
        let mut hasher = blake3::Hasher::new();
        hasher.update(&bytes);
        let template = match source {
            None => None,
            Some(s) => {
                for text in [Some(&s.default), s.tool_use.as_ref()].into_iter().flatten() {
                    hasher.update(&(text.len() as u64).to_le_bytes());
                    hasher.update(text.as_bytes());
                }
                Some(Template::new(&s.origin, &s.default, s.tool_use.as_deref())?)
            }
        };

        let mut eos = Vec::new();
        let named = specials.get("eos_token").and_then(|t| inner.token_to_id(t.as_str()?));
        for file in ["generation_config.json", "config.json"] {
            eos.extend(ids(read_object(&dir.join(file))?.get("eos_token_id")));
        }
        // What ends a plain text is the tokenizer's own end; the model's list may begin with an end of turn.
        let text_end = named.or_else(|| eos.first().copied());
        eos.extend(named);
        eos.sort_unstable();
        eos.dedup();
        let added = inner.get_added_tokens_decoder().keys().copied().collect();
        let hash = hasher.finalize().to_hex().to_string();
        Ok(Some(Self { inner, template, specials, eos, text_end, text_start, hash, given, added }))
    }

    /// The ids of `text`; special tokens only where the text itself spells them.
    ///
    /// # Errors
    /// What the tokenizer cannot encode.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let encoding = self.inner.encode_fast(text, false).map_err(|e| self.failed(&e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The ids of `text`, and the bytes of it that each stands for.
    pub(super) fn encode_with_offsets(&self, text: &str) -> Result<Encoded, Error> {
        let encoding = self.inner.encode(text, false).map_err(|e| self.failed(&e.to_string()))?;
        let ids = encoding.get_ids().to_vec();
        // an added token may take the white space around it along (`rstrip`): that is no part of what it says
        let bare = |(id, &(start, end)): (&u32, &(usize, usize))| {
            let said = text.get(start..end).filter(|s| self.added.contains(id) && !s.trim().is_empty());
            said.map_or((start, end), |s| {
                (start + s.len() - s.trim_start().len(), end - (s.len() - s.trim_end().len()))
            })
        };
        let offsets = ids.iter().zip(encoding.get_offsets()).map(bare).collect();
        Ok(Encoded { ids, offsets })
    }

    /// The text of `ids`, special tokens spelled out.
    ///
    /// # Errors
    /// Ids that the tokenizer's decoder cannot join. Ids that it does not know are left out.
    pub fn decode(&self, ids: &[u32]) -> Result<String, Error> {
        self.inner.decode(ids, false).map_err(|e| self.failed(&e.to_string()))
    }

    /// A decoder for ids that come one by one.
    pub fn decoder(&self, skip_special: bool) -> Decoder<'_> {
        Decoder { inner: self.inner.decode_stream(skip_special), path: self }
    }

    /// The id of a token by its exact spelling.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The ids that end a reply, ascending.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// The id that ends a plain text.
    pub fn text_end(&self) -> Option<u32> {
        self.text_end
    }

    /// The ids that the tokenizer puts before a plain text: Llama's begin-of-text, nothing for Qwen.
    pub fn text_start(&self) -> &[u32] {
        &self.text_start
    }

    /// The special tokens that the model's folder names (`eos_token` and its like).
    pub(super) fn specials(&self) -> impl Iterator<Item = &str> {
        self.specials.values().filter_map(|t| t.as_str())
    }

    /// Whether there is a chat template.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// The chat template, where it was given and is not the model's own.
    pub fn given_template(&self) -> Option<&str> {
        self.given.as_deref()
    }

    /// BLAKE3 of `tokenizer.json` and the chat template, in hexadecimal.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// A conversation as text, as transformers' `apply_chat_template(tokenize=False)` gives it.
    ///
    /// `vars` reach the template as variables, over the special tokens.
    ///
    /// # Errors
    /// No template, or what the template raises, with its line.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        vars: &Map<String, Value>,
    ) -> Result<String, Error> {
        let template = self.template()?;
        let list = messages.as_array().ok_or_else(|| Error::Template {
            origin: template.origin().into(),
            line: 0,
            message: "the messages to render are not a list".into(),
        })?;
        let messages: Vec<Jinja> = list.iter().map(|m| Jinja::from(Serde(m))).collect();
        let tools = tools.map_or(Jinja::from(()), |t| Jinja::from(Serde(t)));
        Ok(template.render(&messages, &tools, add_generation_prompt, &self.variables(Some(vars)))?.0)
    }

    pub(super) fn template(&self) -> Result<&Template, Error> {
        self.template.as_ref().ok_or_else(|| {
            Error::ModelLacks(
                "the model has no chat template; give one as data.chat_template = \"FILE.jinja\"".into(),
            )
        })
    }

    /// The special tokens by their names, and the recipe's variables over them.
    pub(super) fn variables(&self, vars: Option<&Map<String, Value>>) -> Variables {
        let mut out = self.specials.clone();
        for (key, value) in vars.into_iter().flatten() {
            out.insert(key.clone(), Jinja::from(Serde(value)));
        }
        out
    }

    fn failed(&self, message: &str) -> Error {
        Error::Tokenizer { path: PathBuf::from("tokenizer.json"), message: message.into() }
    }
}

/// Decodes ids one by one, holding back bytes that are not yet a whole character.
pub struct Decoder<'a> {
    inner: tokenizers::tokenizer::DecodeStream<
        'a,
        tokenizers::ModelWrapper,
        tokenizers::NormalizerWrapper,
        tokenizers::PreTokenizerWrapper,
        tokenizers::PostProcessorWrapper,
        tokenizers::DecoderWrapper,
    >,
    path: &'a Tokenizer,
}

impl Decoder<'_> {
    /// The text that `id` completes, if it completes any.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn step(&mut self, id: u32) -> Result<Option<String>, Error> {
        self.inner.step(id).map_err(|e| self.path.failed(&e.to_string()))
    }
}

struct TemplateSource {
    origin: String,
    default: String,
    tool_use: Option<String>,
}

fn find_template(
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
fn collect_specials(object: &Map<String, Value>, out: &mut Variables) {
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

fn ids(value: Option<&Value>) -> Vec<u32> {
    let one = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(one).collect(),
        Some(v) => one(v).into_iter().collect(),
        None => Vec::new(),
    }
}

/// What the post-processor puts before a text.
fn text_start(inner: &tokenizers::Tokenizer) -> Result<Vec<u32>, String> {
    let encoding = inner.encode("a", true).map_err(|e| e.to_string())?;
    let special = encoding.get_special_tokens_mask().iter().take_while(|m| **m == 1).count();
    Ok(encoding.get_ids()[..special.min(encoding.get_ids().len())].to_vec())
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::Tokenizer { path: path.into(), message: format!("cannot be read: {e}") }),
    }
}

/// A JSON object from a file; empty when there is no file.
fn read_object(path: &Path) -> Result<Map<String, Value>, Error> {
    let Some(bytes) = read(path)? else { return Ok(Map::new()) };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(Error::Tokenizer { path: path.into(), message: "not a JSON object".into() }),
        Err(e) => Err(Error::Tokenizer { path: path.into(), message: format!("not JSON: {e}") }),
    }
}
