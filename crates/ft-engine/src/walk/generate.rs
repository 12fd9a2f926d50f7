//! Token-by-token generation with a KV cache; adapters stay unmerged.

use super::finite::finite;
use super::stage::StageExchange;
use super::visit::{Hooks, NoHooks, Outline, Reading, Visits};
use crate::model::batch::{Context, HostBatch};
use crate::model::mixer::Cache;
use crate::model::stage_boundary::Rows;
use crate::model::{Batch, Decoder};
use candle_core::{DType, Device};
use candle_transformers::generation::{LogitsProcessor, Sampling};
use ft_data::Tokenizer;
use ft_kernels::{Real, Tensor, to_host};

/// Maximum number of tokens of a sample reply.
pub const SAMPLE_TOKENS: usize = 64;
/// Prompt tokens per forward pass; bounds the activation memory of prefill.
pub const PART: usize = 2048;
/// Rows of logits at a time in [`Reader::score`].
const ROWS: usize = 64;

/// A model with a KV cache for one document.
///
/// Keys and values grow by blocks as tokens arrive; cached entries are never moved or recomputed. The state of linear
/// attention has a fixed size, and cannot go back to an earlier token.
///
/// If ranks split the layers, the reader of the first stage leads: [`Hooks::read`] tells the other stages. Their
/// readers [follow](Reader::follow), and the last one sends the logits.
pub struct Reader<'a> {
    decoder: &'a Decoder,
    device: &'a Device,
    caches: Vec<Cache>,
    seen: Vec<u32>,
    /// Most tokens of the document.
    limit: usize,
    hooks: &'a dyn Hooks,
}

impl<'a> Reader<'a> {
    /// A reader with an empty cache.
    pub fn new(decoder: &'a Decoder, device: &'a Device) -> Self {
        let (caches, seen) = (Vec::new(), Vec::new());
        Self { decoder, device, caches, seen, limit: 0, hooks: &NoHooks }.within(usize::MAX)
    }

    /// Limits the document to `tokens` tokens; the cache allocates no more. Clears the cache.
    pub fn within(mut self, tokens: usize) -> Self {
        self.limit = tokens;
        self.clear();
        self
    }

    /// Drops the document and its cache.
    pub fn clear(&mut self) {
        self.caches = self.decoder.layers.iter().map(|l| l.attn.cache(self.limit)).collect();
        self.seen.clear();
    }

    /// Sets the hooks around visits to units.
    pub fn hooks(self, hooks: &'a dyn Hooks) -> Self {
        Self { hooks, ..self }
    }

    /// Number of cached tokens.
    pub fn len(&self) -> usize {
        self.seen.len()
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// Appends tokens and returns the logits after the last one, `[v]` in f32 on the host.
    ///
    /// # Errors
    /// An empty `ids`; non-finite logits; a failed tensor operation.
    pub fn read(&mut self, ids: &[u32]) -> ft_base::Result<Real> {
        let decoder = self.decoder;
        let again = self.turned(ids);
        let ids = again.as_deref().unwrap_or(ids);
        let (mut left, total) = (ids.len(), self.seen.len() + ids.len());
        let mut logits = None;
        for part in ids.chunks(PART) {
            left -= part.len();
            let (past, limit) = (self.seen.len(), self.limit);
            self.hooks.read(&Reading { past, ids: part.to_vec(), total, limit, logits: left == 0 })?;
            logits = self.last_logits(part, total, left == 0)?;
        }
        if let Some(stage) = self.hooks.stage().filter(|_| logits.is_none()) {
            logits = stage.logits(None, decoder.head.vocab)?;
        }
        let logits = logits.ok_or_else(|| candle_core::Error::Msg("nothing to read".into()))?;
        Ok(on_host(&logits)?.flatten_all()?)
    }

    /// Runs tokens through the layers here. Returns the logits after the last one, `[1, v]`, if wanted, on a rank with
    /// the head.
    fn last_logits(&mut self, ids: &[u32], total: usize, wanted: bool) -> ft_base::Result<Option<Tensor>> {
        let (decoder, mut logits) = (self.decoder, None);
        let mut last = |x: &Tensor, ctx: &Context| {
            let x = x.narrow(0, ids.len() - 1, 1)?.contiguous()?;
            logits = Some(decoder.head.logits(&x, ctx)?);
            Ok(())
        };
        self.pass(ids, total, if wanted { Some(&mut last) } else { None })?;
        Ok(logits)
    }

    /// Reads what the first stage reads; the last stage sends it the logits.
    ///
    /// # Errors
    /// A lost rank; a failed tensor operation.
    pub fn follow(&mut self, reading: &Reading) -> ft_base::Result<()> {
        self.limit = reading.limit;
        if reading.past == 0 {
            self.clear();
        }
        self.forget(reading.past);
        let logits = self.last_logits(&reading.ids, reading.total, reading.logits)?;
        if let (Some(stage), Some(logits)) = (self.hooks.stage(), logits) {
            stage.logits(Some(&logits), self.decoder.head.vocab)?;
        }
        Ok(())
    }

    /// Reads a whole document without the cached prefix. `on_row` receives the logits `[v]` after each token,
    /// and returns whether to continue. Returns the logits after the last token; `None` if stopped.
    ///
    /// # Errors
    /// See [`Reader::read`].
    pub fn score(
        &mut self,
        ids: &[u32],
        on_row: &mut dyn FnMut(&[f32]) -> bool,
    ) -> ft_base::Result<Option<Real>> {
        self.forget(0);
        let decoder = self.decoder;
        let mut last = None;
        for part in ids.chunks(PART) {
            let mut go_on = true;
            let mut rows = |x: &Tensor, ctx: &Context| {
                for from in (0..part.len()).step_by(ROWS) {
                    let n = ROWS.min(part.len() - from);
                    let logits = on_host(&decoder.head.logits(&x.narrow(0, from, n)?.contiguous()?, ctx)?)?;
                    for row in 0..n {
                        let row = logits.get(row)?;
                        go_on = go_on && on_row(&row.to_dtype(DType::F32)?.to_vec1()?);
                        last = Some(row).filter(|_| go_on);
                    }
                    if !go_on {
                        break;
                    }
                }
                Ok(())
            };
            self.pass(part, ids.len(), Some(&mut rows))?;
            if !go_on {
                break;
            }
        }
        Ok(last)
    }

    /// The whole document, if with `ids` it has another rotary embedding than its cached tokens; drops these.
    fn turned(&mut self, ids: &[u32]) -> Option<Vec<u32>> {
        let (past, config) = (self.seen.len(), &self.decoder.config);
        if past == 0 || config.rope_length(past) == config.rope_length(past + ids.len()) {
            return None;
        }
        let all = [&self.seen[..], ids].concat();
        self.forget(0);
        Some(all)
    }

    /// Runs tokens through the model, of a document of `total`. `head` receives the output `[n, d]` of the last layer.
    fn pass(&mut self, ids: &[u32], total: usize, head: Option<Head<'_>>) -> ft_base::Result<()> {
        let (n, past) = (ids.len(), self.seen.len());
        let positions: Vec<u32> = (past..past + n).map(|p| p as u32).collect();
        let host = HostBatch { ids, positions: &positions, docs: &[past + n], targets: &[], weights: &[] };
        let config = &self.decoder.config;
        let mut batch = Batch::new(config, host, (0, 0), None, self.device)?;
        if config.rope_turn().is_some() {
            batch = batch.of_document(config, &positions, total, self.device)?;
        }
        let Batch { ids: sent, context: ctx, .. } = batch;
        let (decoder, stage) = (self.decoder, self.hooks.stage());
        // with the head's: ranks that only give their shards make all visits
        let mut pass = Visits::begin(Outline::of(decoder).forward(), self.hooks)?;
        let mut x = match stage.filter(|_| !decoder.units.has_embedding()) {
            Some(stage) => stage.receive(Rows { own: n, attended: n })?.remove(0),
            None => {
                pass.start_visit()?;
                let x = decoder.embedding.forward(&sent)?;
                decoder.embedding.begin(&x, &sent, &ctx)?;
                pass.end_visit()?;
                x
            }
        };
        for l in decoder.units.own_layers() {
            pass.start_visit()?;
            x = decoder.layers[l].forward(&x, &ctx, Some(&mut self.caches[l]), None)?.0;
            pass.end_visit()?;
        }
        self.seen.extend(ids);
        if let Some(stage) = stage.filter(|_| !decoder.units.has_head()) {
            stage.exchange(true, StageExchange { out: Some(vec![x]), into: None })?;
            return Ok(());
        }
        pass.start_visit()?;
        if let Some(head) = head {
            head(&x, &ctx)?;
        }
        pass.end_visit()
    }

    /// Drops the cache after `keep` tokens, or entirely if a layer's state cannot go back. Returns the number of tokens
    /// left.
    fn forget(&mut self, keep: usize) -> usize {
        if keep < self.seen.len() && !self.caches.iter_mut().all(|cache| cache.truncate(keep)) {
            return self.forget(0);
        }
        self.seen.truncate(keep);
        self.seen.len()
    }

    /// Reads a whole document and returns the logits after the last token. Reuses the cached prefix shared
    /// with the previous document and drops the rest of the cache.
    ///
    /// # Errors
    /// See [`Reader::read`].
    pub fn read_document(&mut self, ids: &[u32]) -> ft_base::Result<Real> {
        let common = self.seen.iter().zip(ids).take_while(|(a, b)| a == b).count();
        // the last token must be read for its logits
        let keep = common.min(ids.len().saturating_sub(1));
        // A document of another length may have another rotary embedding.
        let of = |tokens: usize| self.decoder.config.rope_length(tokens);
        let keep = if of(self.seen.len()) == of(ids.len()) { keep } else { 0 };
        let keep = self.forget(keep);
        self.read(&ids[keep..])
    }
}

/// Receives the output of the last layer.
type Head<'a> = &'a mut dyn FnMut(&Tensor, &Context) -> ft_base::Result<()>;

/// Logits on the host, where sampling runs; sampling needs finite ones.
fn on_host(logits: &Tensor) -> ft_base::Result<Real> {
    let logits = to_host(logits.real()?)?;
    finite(&logits, "the model", "hint: its weights, or its adapter's, have diverged or are damaged")?;
    Ok(logits)
}

/// Greedy sampler: picks the most likely token.
pub fn greedy() -> LogitsProcessor {
    LogitsProcessor::from_sampling(0, Sampling::ArgMax)
}

/// Reply of a model.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// Decoded text.
    pub text: String,
    /// Generated tokens, not counting an end-of-sequence token.
    pub tokens: usize,
    /// An end-of-sequence token ended the reply.
    pub ended: bool,
}

/// Generates a reply up to an end-of-sequence token or `max_tokens`. `on_text` receives each piece of text
/// and returns whether to continue.
///
/// # Errors
/// An empty prompt; a failed tensor operation; tokens not decodable to text.
pub fn answer(
    reader: &mut Reader<'_>,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    max_tokens: usize,
    sampler: &mut LogitsProcessor,
    on_text: &mut dyn FnMut(&str) -> bool,
) -> ft_base::Result<Reply> {
    if prompt.is_empty() {
        let why = "the chat template and the tokenizer make no tokens of this conversation, so there is nothing to \
                   answer\n  hint: --chat-template FILE, or data.chat_template, names another template";
        return Err(ft_data::Error::ModelLacks(why.into()).into());
    }
    struct Answer<'a>(&'a mut LogitsProcessor, &'a mut dyn FnMut(&str) -> bool);
    impl Writer for Answer<'_> {
        fn choose(&mut self, logits: &Real) -> ft_base::Result<u32> {
            Ok(self.0.sample(logits)?)
        }

        fn write(&mut self, piece: &str) -> bool {
            piece.is_empty() || (self.1)(piece)
        }
    }
    let logits = reader.read_document(prompt)?;
    reply(reader, tokenizer, logits, tokenizer.decoder(true), max_tokens, &mut Answer(sampler, on_text))
}

/// Chooses the tokens of a reply, and receives its text.
pub trait Writer {
    /// The next token, given the logits `[v]`.
    ///
    /// # Errors
    /// A failed tensor operation.
    fn choose(&mut self, logits: &Real) -> ft_base::Result<u32>;
    /// Takes the text completed by a token, if any; returns whether to continue.
    fn write(&mut self, piece: &str) -> bool;
}

/// As [`answer`], with the logits after the prompt, a decoder and a [`Writer`].
///
/// # Errors
/// As [`answer`].
pub fn reply(
    reader: &mut Reader<'_>,
    tokenizer: &Tokenizer,
    mut logits: Real,
    mut text: ft_data::Decoder<'_>,
    max_tokens: usize,
    writer: &mut dyn Writer,
) -> ft_base::Result<Reply> {
    let mut out = Reply::default();
    for left in (0..max_tokens).rev() {
        let next = writer.choose(&logits)?;
        if tokenizer.eos().contains(&next) {
            out.ended = true;
            break;
        }
        out.tokens += 1;
        let piece = text.step(next)?.unwrap_or_default();
        out.text.push_str(&piece);
        if !writer.write(&piece) {
            break;
        }
        if left > 0 {
            logits = reader.read(&[next])?;
        }
    }
    Ok(out)
}
