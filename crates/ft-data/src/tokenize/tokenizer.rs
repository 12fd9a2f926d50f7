//! Tokenizer and chat template of a model folder.

use super::added::{Added, Extended};
use super::model_files::{ModelFiles, TemplateSource, read};
use super::model_key::ModelKey;
use super::pipeline::{self, Pipeline};
use crate::error::Error;
use crate::shape::{messages::Chat, notes::Note};
use crate::text::{
    conversation,
    marks::jinja,
    template::{Template, Variables},
};
use ft_base::memory::on_stack;
use ft_base::terminal::{panics::caught, warn};
use minijinja::Value as Jinja;
use minijinja::value::Serde;
use serde_json::{Map, Value, json};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tokenizers::ModelWrapper;

/// Converts text to token ids and back, and conversations to text.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    template: Option<Template>,
    specials: Variables,
    eos: Vec<u32>,
    /// The texts of `eos`.
    stops: Vec<String>,
    text_end: Option<u32>,
    text_start: Vec<u32>,
    text_suffix: Vec<u32>,
    hash: String,
    /// Hash of the chat template.
    template_hash: Option<String>,
    key: Option<ModelKey>,
    path: PathBuf,
    /// Whether a text can be tokenized in pieces.
    can_cut: bool,
    /// An explicitly given template.
    given: Option<TemplateSource>,
    /// Ids of all added tokens, ascending.
    added: Vec<u32>,
    /// `tokenizer.json` extended by new tokens, if any.
    more: Option<Extended>,
}

/// Hash of a chat template, in hexadecimal.
fn hash_of(template: &TemplateSource) -> String {
    let texts = json!([template.default, template.tool_use]).to_string();
    blake3::hash(texts.as_bytes()).to_hex()[..32].to_string()
}

/// Identity of a tokenizer, as far as rows of token ids depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizerIdentity {
    /// Hash of all tokens and their ids, in hexadecimal.
    pub vocabulary: String,
    /// Hash of the chat template, if there is one.
    pub template: Option<String>,
}

/// The first token ids of a text, with byte offsets into the text.
pub(crate) struct Encoded {
    pub ids: Vec<u32>,
    pub offsets: Vec<(usize, usize)>,
    /// Number of tokens of the full text.
    pub total: usize,
    /// Whether an omitted token starts inside one of the given ranges.
    pub more_within: bool,
}

/// Bytes per piece of a text. Tokenizing takes about two hundred times as much memory.
const PIECE: usize = 64 << 10;
/// Largest piece to tokenize at once if no cut is possible, in bytes.
const LONGEST_PIECE: usize = 4 << 20;
/// Pieces above this size are tokenized one at a time across threads, in bytes.
const ALONE: usize = 256 << 10;
static TURN: Mutex<()> = Mutex::new(());
/// Stack size for loading a tokenizer, as regular expressions may be deeply nested.
const STACK: usize = 16 << 20;

impl Tokenizer {
    /// Loads the tokenizer of model folder `dir`; `None` without a `tokenizer.json`.
    ///
    /// The chat template is `chat_template` if given, else `chat_template.jinja`, `chat_template.json`, or
    /// the key in `tokenizer_config.json`, in transformers' order. End-of-sequence ids come from
    /// `generation_config.json`, `config.json` and `tokenizer_config.json`.
    ///
    /// # Errors
    /// Existing files that are invalid.
    pub fn load(dir: &Path, chat_template: Option<&Path>) -> Result<Option<Self>, Error> {
        Self::load_with(dir, chat_template, &Added::default())
    }

    /// As [`Tokenizer::load`], with additional tokens.
    ///
    /// # Errors
    /// As [`Tokenizer::load`]; also a token with a conflicting id.
    pub fn load_with(dir: &Path, chat_template: Option<&Path>, more: &Added) -> Result<Option<Self>, Error> {
        let path = dir.join("tokenizer.json");
        let Some(own) = read(dir, "tokenizer.json")? else { return Ok(None) };
        let bad = |message: String| Error::tokenizer(&path, message);
        let more = more.to(&own).map_err(&bad)?;
        let bytes = more.as_ref().map_or(own.as_slice(), |(file, _)| file.as_slice());
        let pipeline: Pipeline =
            serde_json::from_slice(bytes).map_err(|e| bad(format!("not a tokenizer: {e}")))?;
        pipeline.check().map_err(&bad)?;
        let loaded =
            on_stack(STACK, || library(bytes)).map_err(|e| bad(format!("no thread to read it: {e}")))?;
        let mut inner = loaded.unwrap_or_else(|_| Err("a panic".into())).map_err(&bad)?;
        turn_off_dropout(&mut inner, &path);
        for (text, id) in more.iter().flat_map(|(_, tokens)| tokens) {
            if inner.token_to_id(text) != Some(*id) {
                return Err(bad(format!("{text:?} cannot be added to it as token {id}")));
            }
        }
        // on the rayon threads used for tokenizing: the library's regex caches belong to the first thread
        // to use them, and other threads contend for them
        let (inner, [text_start, text_suffix]) = rayon::scope(|_| tried(inner)).map_err(&bad)?;

        let ModelFiles { specials, template: source, mut eos } = ModelFiles::read(dir, chat_template)?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(bytes);
        for text in source.iter().flat_map(|s| [Some(&s.default), s.tool_use.as_ref()]).flatten() {
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        }
        let template_hash = source.as_ref().map(hash_of);
        let template = |s: &TemplateSource| Template::new(&s.origin, &s.default, s.tool_use.as_deref());
        let template = source.as_ref().map(template).transpose()?;
        let given = source.filter(|_| chat_template.is_some());

        let named = specials.get("eos_token").and_then(|t| inner.token_to_id(t.as_str()?));
        // Plain texts end with the tokenizer's own EOS; the model's list may start with an end-of-turn
        // token.
        let text_end = named.or_else(|| eos.first().copied());
        eos.extend(named);
        eos.sort_unstable();
        eos.dedup();
        let hash = hasher.finalize().to_hex().to_string();
        let can_cut = pipeline.can_cut();
        let stops =
            eos.iter().filter_map(|id| inner.id_to_token(*id)).filter(|t| !t.trim().is_empty()).collect();
        let mut added: Vec<u32> = inner.get_added_tokens_decoder().keys().copied().collect();
        added.sort_unstable();
        Ok(Some(Self {
            inner,
            template,
            specials: Arc::new(specials),
            eos,
            stops,
            text_end,
            text_start,
            text_suffix,
            hash,
            template_hash,
            key: ModelKey::of(dir, chat_template).map(|k| k.with(more.as_ref().map(|(_, tokens)| tokens))),
            path,
            can_cut,
            given,
            added,
            more,
        }))
    }

    /// The extended `tokenizer.json` and the new tokens, if any.
    pub fn with_added(&self) -> Option<&Extended> {
        self.more.as_ref()
    }

    /// Token ids of `text`. Special tokens appear only if spelled out in the text.
    ///
    /// # Errors
    /// Text the tokenizer cannot encode.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(self.encode_first(text, usize::MAX, &[])?.ids)
    }

    /// The first `keep` ids of `text`, and the total count. Memory does not depend on omitted tokens.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub(crate) fn encode_first(
        &self,
        text: &str,
        keep: usize,
        within: &[Range<usize>],
    ) -> Result<Encoded, Error> {
        self.encode_pieces(text, PIECE, keep, within)
    }

    fn encode_pieces(
        &self,
        text: &str,
        size: usize,
        keep: usize,
        within: &[Range<usize>],
    ) -> Result<Encoded, Error> {
        let mut out = Encoded { ids: Vec::new(), offsets: Vec::new(), total: 0, more_within: false };
        let mut from = 0;
        loop {
            let to = self.piece(text, from, size)?;
            let piece = &text[from..to];
            let turn = (piece.len() > ALONE).then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
            let encoding = self.call(|| self.inner.encode(piece, false))?;
            drop(turn);
            let ids = encoding.get_ids();
            let kept = ids.len().min(keep - out.ids.len());
            out.ids.extend_from_slice(&ids[..kept]);
            out.offsets.extend(ids[..kept].iter().zip(encoding.get_offsets()).map(|(id, o)| {
                let (start, end) = self.bare(piece, *id, *o);
                (from + start, from + end)
            }));
            out.total += ids.len();
            out.more_within |= encoding.get_offsets()[kept..].iter().any(|o| is_within(within, from + o.0));
            if to == text.len() {
                return Ok(out);
            }
            from = to;
        }
    }

    /// The byte range of a token in `text`, without white space absorbed by an added token (`rstrip`).
    fn bare(&self, text: &str, id: u32, (start, end): (usize, usize)) -> (usize, usize) {
        // possible first or last bytes of white space
        let space = |at: usize| text.as_bytes().get(at).is_some_and(|b| *b <= b' ' || *b >= 0x80);
        if !space(start) && !space(end.wrapping_sub(1)) {
            return (start, end);
        }
        match text.get(start..end).filter(|s| self.added.binary_search(&id).is_ok() && !s.trim().is_empty()) {
            Some(s) => (start + s.len() - s.trim_start().len(), end - (s.len() - s.trim_end().len())),
            None => (start, end),
        }
    }

    /// End of the piece of `text` starting at `from`.
    fn piece(&self, text: &str, from: usize, size: usize) -> Result<usize, Error> {
        let cut = if text.len() - from > 2 * size && self.can_cut {
            pipeline::cut(text, from + size)
        } else {
            None
        };
        let to = cut.unwrap_or(text.len());
        if to - from > LONGEST_PIECE {
            return Err(Error::TooLong(format!(
                "{} bytes of text would be tokenized at once, more than {} MiB: there is no place to cut them that \
                 certainly leaves their tokens as they are; shorten the text, or split it into rows",
                to - from,
                LONGEST_PIECE >> 20
            )));
        }
        Ok(to)
    }

    /// As [`called`], with the path of the tokenizer.
    fn call<T>(&self, f: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, Error> {
        called(f).map_err(|message| Error::tokenizer(&self.path, message))
    }

    /// The text of `ids`, with special tokens spelled out.
    ///
    /// # Errors
    /// Ids the decoder cannot join. Unknown ids are skipped.
    pub fn decode(&self, ids: &[u32]) -> Result<String, Error> {
        self.call(|| self.inner.decode(ids, false))
    }

    /// The text of one token, with a leading space if it begins a word, and true; for a part of a character the
    /// spelling in the vocabulary, and false.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn token_text(&self, id: u32) -> Result<(String, bool), Error> {
        let spelling = self.inner.id_to_token(id).unwrap_or_default();
        let text = self.decode(&[id])?;
        Ok(match text.contains(char::REPLACEMENT_CHARACTER) {
            true => (spelling, false),
            false if spelling.starts_with('\u{2581}') && !text.starts_with(' ') => (format!(" {text}"), true),
            false => (text, true),
        })
    }

    /// Returns a streaming decoder.
    pub fn decoder(&self, skip_special: bool) -> Decoder<'_> {
        let inner = self.inner.decode_stream(skip_special);
        Decoder { inner, held: Vec::new(), last: None, skip_special, tokenizer: self }
    }

    /// The id of a token by exact spelling.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether a token has this id.
    pub fn has(&self, id: u32) -> bool {
        self.inner.id_to_token(id).is_some()
    }

    /// End-of-sequence ids, ascending.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// The id appended to a plain text.
    pub fn text_end(&self) -> Option<u32> {
        self.text_end
    }

    /// The ids put before a plain text: begin-of-text for Llama, none for Qwen.
    pub fn text_start(&self) -> &[u32] {
        &self.text_start
    }

    /// The ids that the tokenizer puts behind a text: end-of-text for Qwen3-Embedding, none for Qwen3.
    pub(super) fn text_suffix(&self) -> &[u32] {
        &self.text_suffix
    }

    /// The special tokens named in the model folder (`eos_token` etc.).
    pub(super) fn specials(&self) -> impl Iterator<Item = &str> {
        self.specials.values().filter_map(|t| t.as_str())
    }

    /// The chat template, if given explicitly instead of the model's own.
    pub fn given_template(&self) -> Option<&TemplateSource> {
        self.given.as_ref()
    }

    /// Whether a chat template is available.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// Cache key of the files that determine tokens; `None` if tokens depend on the time of day.
    pub(crate) fn key(&self) -> Option<&ModelKey> {
        self.key.as_ref()
    }

    /// BLAKE3 hash of `tokenizer.json` and the chat template, in hexadecimal.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Identity of token ids and of the chat template.
    pub fn identity(&self) -> TokenizerIdentity {
        let mut tokens: Vec<(u32, String)> =
            self.inner.get_vocab(true).into_iter().map(|(text, id)| (id, text)).collect();
        tokens.sort_unstable();
        let mut hasher = blake3::Hasher::new();
        for (id, text) in &tokens {
            hasher
                .update(&id.to_le_bytes())
                .update(&(text.len() as u64).to_le_bytes())
                .update(text.as_bytes());
        }
        let vocabulary = hasher.finalize().to_hex()[..32].to_string();
        TokenizerIdentity { vocabulary, template: self.template_hash.clone() }
    }

    /// A token with another id or another text in another tokenizer, in words; `None` for the same vocabulary.
    pub fn differs(&self, other: &Self) -> Option<String> {
        let [own, theirs] = [self, other].map(|t| t.inner.get_vocab(true));
        let id = |id: Option<&u32>| id.map_or("no token".into(), |id| format!("token {id}"));
        let texts = own.keys().chain(theirs.keys());
        let text = texts.filter(|text| own.get(*text) != theirs.get(*text)).min()?;
        Some(format!("{text:?} is {} here and {} there", id(own.get(text)), id(theirs.get(text))))
    }

    /// Renders a conversation, like transformers' `apply_chat_template(tokenize=False)`.
    ///
    /// `vars` become template variables and override the special tokens.
    ///
    /// # Errors
    /// No template, or an error raised by the template, with line number.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        vars: &Map<String, Value>,
    ) -> Result<String, Error> {
        let template = self.template()?;
        let list = messages.as_array();
        let list = list.ok_or_else(|| template.fail(0, "the messages to render are not a list"))?;
        let messages: Vec<Jinja> = list.iter().map(jinja).collect();
        let tools = tools.map_or(Jinja::from(()), |t| Jinja::from(Serde(t)));
        let text = template.render(&messages, &tools, add_generation_prompt, &self.variables(Some(vars)))?.0;
        if text.is_empty() && !list.is_empty() {
            return Err(template.fail(0, "it writes nothing for a conversation"));
        }
        Ok(text)
    }

    /// Whether every conversation sets this variable of chat templates itself; it cannot be given then.
    pub fn sets(variable: &str) -> bool {
        Template::sets(variable)
    }

    /// The first given variable not read by the chat template, and the names read by it.
    pub fn unread<'v>(&self, vars: &'v Map<String, Value>) -> Option<(&'v str, Vec<&str>)> {
        let names = self.template.as_ref()?.names();
        let unread = vars.keys().find(|name| !names.contains(*name))?;
        Some((unread, names.iter().map(String::as_str).collect()))
    }

    fn template(&self) -> Result<&Template, Error> {
        self.template.as_ref().ok_or_else(|| {
            Error::ModelLacks(
                "the model has no chat template; give one as data.chat_template = \"FILE.jinja\"".into(),
            )
        })
    }

    /// Renders a conversation, and finds the assistant's text; see [`conversation::render`].
    pub(crate) fn conversation(
        &self,
        chat: &Chat,
        vars: &Map<String, Value>,
        supervise: bool,
        notes: &mut Vec<Note>,
    ) -> Result<(String, Vec<Range<usize>>), String> {
        let template = self.template().map_err(|e| e.to_string())?;
        let variables = [self.variables(None), self.variables(Some(vars))];
        conversation::render(chat, template, variables, &self.stops, supervise, notes)
    }

    /// Template variables: the special tokens by name, overridden by the recipe's variables.
    fn variables(&self, vars: Option<&Map<String, Value>>) -> Variables {
        let mut out = self.specials.clone();
        if let Some(vars) = vars.filter(|v| !v.is_empty()) {
            Arc::make_mut(&mut out).extend(vars.iter().map(|(k, v)| (k.clone(), Jinja::from(Serde(v)))));
        }
        out
    }
}

/// Streaming decoder; holds back incomplete UTF-8 sequences.
pub struct Decoder<'a> {
    inner: tokenizers::tokenizer::DecodeStream<
        'a,
        tokenizers::ModelWrapper,
        tokenizers::NormalizerWrapper,
        tokenizers::PreTokenizerWrapper,
        tokenizers::PostProcessorWrapper,
        tokenizers::DecoderWrapper,
    >,
    /// Ids since the last text.
    held: Vec<u32>,
    /// The id that completed the last text.
    last: Option<u32>,
    skip_special: bool,
    tokenizer: &'a Tokenizer,
}

impl Decoder<'_> {
    /// The text completed by `id`, if any. With byte fallback, an invalid byte also changes the text of valid bytes
    /// before it, and the library's stream fails: then as [`Self::flush`].
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn step(&mut self, id: u32) -> Result<Option<String>, Error> {
        self.held.push(id);
        let tokenizer = self.tokenizer;
        let stepped = tokenizer.call(|| self.inner.step(id));
        if !matches!(stepped, Ok(None)) {
            self.last = Some(id);
        }
        match stepped {
            Ok(Some(text)) => {
                self.held.clear();
                Ok(Some(text))
            }
            Ok(None) => Ok(None),
            Err(_) => self.flush().map(Some),
        }
    }

    /// Number of ids since the last text.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// The text of the ids since the last text, apart. The stream begins anew.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn flush(&mut self) -> Result<String, Error> {
        let tokenizer = self.tokenizer;
        let text = tokenizer.call(|| tokenizer.inner.decode(&self.held, self.skip_special))?;
        self.held.clear();
        self.inner = tokenizer.inner.decode_stream(self.skip_special);
        // context: the first word of a stream may lose its space
        if let Some(id) = self.last
            && tokenizer.call(|| self.inner.step(id))?.is_none()
        {
            // only a part of a character
            self.inner = tokenizer.inner.decode_stream(self.skip_special);
        }
        Ok(text)
    }
}

/// Loads the library's tokenizer, with truncation and padding disabled.
fn library(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    called(|| {
        // parsed by compiled code of the library; `from_bytes` is generic, and would be compiled here
        let mut inner: tokenizers::Tokenizer = std::str::from_utf8(bytes)?.parse()?;
        inner.with_truncation(None)?;
        inner.with_padding(None);
        Ok(inner)
    })
}

/// Turns off BPE dropout, with a warning: tokens of a text would differ from run to run.
fn turn_off_dropout(inner: &mut tokenizers::Tokenizer, path: &Path) {
    let ModelWrapper::BPE(model) = inner.get_model() else { return };
    let Some(p) = model.dropout.filter(|p| *p > 0.0) else { return };
    let mut model = model.clone();
    model.dropout = None;
    inner.with_model(model);
    warn(&format!("{}: model.dropout = {p} is turned off; tokens would be random", path.display()));
}

/// Removes the post-processor, and returns the ids it puts before and behind a text, found by encoding a probe.
fn tried(mut inner: tokenizers::Tokenizer) -> Result<(tokenizers::Tokenizer, [Vec<u32>; 2]), String> {
    called(|| {
        pipeline::check_post_processor(&serde_json::to_value(inner.get_post_processor())?)?;
        let encoding = inner.encode("a", true)?;
        let (ids, special) = (encoding.get_ids(), encoding.get_special_tokens_mask());
        let before = special.iter().take_while(|m| **m == 1).count().min(ids.len());
        let behind = special.iter().rev().take_while(|m| **m == 1).count().min(ids.len() - before);
        let around = [&ids[..before], &ids[ids.len() - behind..]].map(<[u32]>::to_vec);
        // Special tokens are added explicitly, and offset trimming would shift masks.
        inner.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        // fail early if even a trivial text breaks the tokenizer
        if let Ok(text) = inner.encode("Hello, world 1", false) {
            let _ = inner.decode(text.get_ids(), false);
        }
        Ok((inner, around))
    })
}

/// Calls the library, and turns errors and panics into messages.
fn called<T>(f: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match caught(f) {
        Ok(out) => out.map_err(|e| e.to_string()),
        Err(panic) => Err(format!("the tokenizer does not hold together: {panic}")),
    }
}

/// Whether an offset lies in one of the sorted ranges.
fn is_within(ranges: &[Range<usize>], at: usize) -> bool {
    let next = ranges.partition_point(|r| r.end <= at);
    ranges.get(next).is_some_and(|r| r.start <= at)
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
