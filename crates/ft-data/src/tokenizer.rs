//! A model's tokenizer and chat template, from its folder.

use super::added::{Added, Extended};
use super::beside::{collect_specials, find_template, ids, read, read_object};
use super::cache::ModelKey;
use super::error::Error;
use super::pipeline::{self, Pipeline};
use super::template::{Template, Variables};
use ft_base::terminal::panics::caught;
use minijinja::Value as Jinja;
use minijinja::value::Serde;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Text to token ids and back, conversations to text.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    template: Option<Template>,
    specials: Variables,
    eos: Vec<u32>,
    text_end: Option<u32>,
    text_start: Vec<u32>,
    hash: String,
    key: Option<ModelKey>,
    path: PathBuf,
    /// Whether a text can be tokenized in pieces.
    can_cut: bool,
    /// The text of the template file that was named.
    given: Option<String>,
    /// Tokens beside the model's own, which stand for themselves; ascending.
    added: Vec<u32>,
    /// Tokens that its file does not have, and the file with them.
    more: Option<Extended>,
}

/// The first token ids of a text, and for each the bytes of the text that it stands for.
pub(super) struct Encoded {
    pub ids: Vec<u32>,
    pub offsets: Vec<(usize, usize)>,
    /// How many tokens the whole text has.
    pub total: usize,
    /// Whether a token that is not among the first begins in one of the ranges.
    pub more_within: bool,
}

/// Bytes of a piece that a text is tokenized in: a piece takes some two hundred times as much.
const PIECE: usize = 64 << 10;
/// Bytes that are tokenized at once where there is no place to cut.
const LONGEST_PIECE: usize = 4 << 20;
/// Longer pieces are tokenized one at a time.
const ALONE: usize = 256 << 10;
static TURN: Mutex<()> = Mutex::new(());
/// Bytes of stack for reading a tokenizer, whose regular expressions may be nested.
const STACK: usize = 16 << 20;

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
        Self::load_with(dir, chat_template, &Added::default())
    }

    /// As [`Tokenizer::load`], with more tokens.
    ///
    /// # Errors
    /// As [`Tokenizer::load`]; a token that has another number there.
    pub fn load_with(dir: &Path, chat_template: Option<&Path>, more: &Added) -> Result<Option<Self>, Error> {
        let path = dir.join("tokenizer.json");
        let Some(own) = read(&path)? else { return Ok(None) };
        let bad = |message: String| Error::Tokenizer { path: path.clone(), message };
        let more = more.to(&own).map_err(&bad)?;
        let bytes = more.as_ref().map_or(own.as_slice(), |(file, _)| file.as_slice());
        let pipeline: Pipeline =
            serde_json::from_slice(bytes).map_err(|e| bad(format!("not a tokenizer: {e}")))?;
        pipeline.check().map_err(&bad)?;
        let inner = on_a_large_stack(|| library(bytes)).map_err(&bad)?;
        for (text, id) in more.iter().flat_map(|(_, tokens)| tokens) {
            if inner.token_to_id(text) != Some(*id) {
                return Err(bad(format!("{text:?} cannot be added to it as token {id}")));
            }
        }
        // where texts will be tokenized: what the library's regular expressions keep is the first thread's that uses
        // them, and others wait for each other
        let (inner, text_start) = rayon::scope(|_| tried(inner)).map_err(&bad)?;

        let config_path = dir.join("tokenizer_config.json");
        let config = read_object(&config_path)?;
        let mut specials = BTreeMap::new();
        for source in [&read_object(&dir.join("special_tokens_map.json"))?, &config] {
            collect_specials(source, &mut specials);
        }
        let source = find_template(dir, chat_template, &config, &config_path)?;
        let given = source.as_ref().filter(|_| chat_template.is_some()).map(|s| s.default.clone());
        let mut hasher = blake3::Hasher::new();
        hasher.update(bytes);
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
        let hash = hasher.finalize().to_hex().to_string();
        let can_cut = pipeline.can_cut();
        let mut added: Vec<u32> = inner.get_added_tokens_decoder().keys().copied().collect();
        added.sort_unstable();
        Ok(Some(Self {
            inner,
            template,
            specials: Arc::new(specials),
            eos,
            text_end,
            text_start,
            hash,
            key: ModelKey::of(dir, chat_template).map(|k| k.with(more.as_ref().map(|(_, tokens)| tokens))),
            path,
            can_cut,
            given,
            added,
            more,
        }))
    }

    /// Its file with the tokens that it got, and which these are; nothing where it got none.
    pub fn with_added(&self) -> Option<&Extended> {
        self.more.as_ref()
    }

    /// The ids of `text`; special tokens only where the text itself spells them.
    ///
    /// # Errors
    /// What the tokenizer cannot encode.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(self.encode_first(text, usize::MAX, &[])?.ids)
    }

    /// The first `keep` ids of `text`, and how many there are. Memory does not depend on what is not kept.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub(super) fn encode_first(
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

    /// The bytes of `text` that a token stands for. An added token may take the white space around it along
    /// (`rstrip`): that is no part of what it says.
    fn bare(&self, text: &str, id: u32, (start, end): (usize, usize)) -> (usize, usize) {
        // what white space may begin or end with
        let space = |at: usize| text.as_bytes().get(at).is_some_and(|b| *b <= b' ' || *b >= 0x80);
        if !space(start) && !space(end.wrapping_sub(1)) {
            return (start, end);
        }
        match text.get(start..end).filter(|s| self.added.binary_search(&id).is_ok() && !s.trim().is_empty()) {
            Some(s) => (start + s.len() - s.trim_start().len(), end - (s.len() - s.trim_end().len())),
            None => (start, end),
        }
    }

    /// Where the piece of `text` that begins at `from` ends.
    fn piece(&self, text: &str, from: usize, size: usize) -> Result<usize, Error> {
        let cut = match text.len() - from > 2 * size && self.can_cut {
            true => pipeline::cut(text, from + size),
            false => None,
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

    /// What the library says of a call; a panic of it is an error too.
    fn call<T>(&self, f: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, Error> {
        match caught(f) {
            Ok(Ok(out)) => Ok(out),
            Ok(Err(e)) => Err(self.failed(&e.to_string())),
            Err(panic) => Err(self.failed(&broken(&panic))),
        }
    }

    /// The text of `ids`, special tokens spelled out.
    ///
    /// # Errors
    /// Ids that the tokenizer's decoder cannot join. Ids that it does not know are left out.
    pub fn decode(&self, ids: &[u32]) -> Result<String, Error> {
        self.call(|| self.inner.decode(ids, false))
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

    /// The chat template, where it was given and is not the model's own.
    pub fn given_template(&self) -> Option<&str> {
        self.given.as_deref()
    }

    /// Whether there is a chat template.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// What of its files decides tokens; `None` where the time of day does too.
    pub(super) fn key(&self) -> Option<&ModelKey> {
        self.key.as_ref()
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
        let text = template.render(&messages, &tools, add_generation_prompt, &self.variables(Some(vars)))?.0;
        if text.is_empty() && !list.is_empty() {
            let message = "it writes nothing for a conversation".to_string();
            return Err(Error::Template { origin: template.origin().into(), line: 0, message });
        }
        Ok(text)
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
        if let Some(vars) = vars.filter(|v| !v.is_empty()) {
            Arc::make_mut(&mut out).extend(vars.iter().map(|(k, v)| (k.clone(), Jinja::from(Serde(v)))));
        }
        out
    }

    fn failed(&self, message: &str) -> Error {
        Error::Tokenizer { path: self.path.clone(), message: message.into() }
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
        let inner = &mut self.inner;
        self.path.call(|| inner.step(id))
    }
}

/// The library's tokenizer without what would change samples behind our back.
fn library(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    let load = || {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)?;
        inner.with_truncation(None)?;
        inner.with_padding(None);
        Ok::<_, tokenizers::Error>(inner)
    };
    caught(load).map_err(|panic| broken(&panic))?.map_err(|e| e.to_string())
}

/// A tokenizer without its post-processor, and what that puts before a text; it is tried on one.
fn tried(mut inner: tokenizers::Tokenizer) -> Result<(tokenizers::Tokenizer, Vec<u32>), String> {
    let run = || {
        let encoding = inner.encode("a", true)?;
        let special = encoding.get_special_tokens_mask().iter().take_while(|m| **m == 1).count();
        let text_start = encoding.get_ids()[..special.min(encoding.get_ids().len())].to_vec();
        // Post-processors add special tokens, which we do by name, and trim offsets, which would move masks.
        inner.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        // what breaks on any text at all is told now
        if let Ok(text) = inner.encode("Hello, world 1", false) {
            let _ = inner.decode(text.get_ids(), false);
        }
        Ok::<_, tokenizers::Error>((inner, text_start))
    };
    caught(run).map_err(|panic| broken(&panic))?.map_err(|e| e.to_string())
}

/// What is said of a file that makes the library panic.
fn broken(panic: &str) -> String {
    format!("the tokenizer does not hold together: {panic}")
}

fn on_a_large_stack<T: Send>(f: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, f);
        thread
            .map_err(|e| format!("no thread to read it: {e}"))?
            .join()
            .unwrap_or_else(|_| Err("a panic".into()))
    })
}

/// Whether a byte lies in one of the ranges, which are in order.
fn is_within(ranges: &[Range<usize>], at: usize) -> bool {
    let next = ranges.partition_point(|r| r.end <= at);
    ranges.get(next).is_some_and(|r| r.start <= at)
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
