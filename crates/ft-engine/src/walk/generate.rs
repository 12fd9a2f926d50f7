//! Token-by-token generation with a KV cache; adapters stay unmerged.

use super::finite::finite;
use super::visit::{Hooks, NoHooks, Outline, Pass};
use crate::model::attention::Cache;
use crate::model::batch::HostBatch;
use crate::model::{Batch, Decoder};
use candle_core::Device;
use candle_transformers::generation::{LogitsProcessor, Sampling};
use ft_data::Tokenizer;
use ft_kernels::{Real, Tensor, to_host};

/// Maximum number of tokens of a sample reply.
pub const SAMPLE_TOKENS: usize = 64;
/// Prompt tokens per forward pass; bounds the activation memory of prefill.
pub const PART: usize = 2048;

/// A model with a KV cache for one document.
///
/// The cache grows by blocks of [`Cache`] as tokens arrive; cached entries are never moved or recomputed.
pub struct Reader<'a> {
    decoder: &'a Decoder,
    device: &'a Device,
    caches: Vec<Cache>,
    seen: Vec<u32>,
    hooks: &'a dyn Hooks,
}

impl<'a> Reader<'a> {
    /// A reader with an empty cache.
    pub fn new(decoder: &'a Decoder, device: &'a Device) -> Self {
        Self { decoder, device, caches: Vec::new(), seen: Vec::new(), hooks: &NoHooks }.within(usize::MAX)
    }

    /// Limits the document to `tokens` tokens; the cache allocates no more. Clears the cache.
    pub fn within(self, tokens: usize) -> Self {
        let caches = self.decoder.layers.iter().map(|_| Cache::new(tokens)).collect();
        Self { caches, seen: Vec::new(), ..self }
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
        let mut left = ids.len();
        let mut logits = None;
        for part in ids.chunks(PART) {
            left -= part.len();
            logits = self.pass(part, left == 0)?;
        }
        let Some(logits) = logits else {
            return Err(candle_core::Error::Msg("nothing to read".into()).into());
        };
        // sampling runs on the host
        let logits = to_host(&logits.real()?.squeeze(0)?)?;
        // sampling needs finite logits
        finite(&logits, "the model", "hint: its weights, or its adapter's, have diverged or are damaged")?;
        Ok(logits)
    }

    /// Runs tokens through the model. Returns the logits `[1, v]` after the last one, if requested.
    fn pass(&mut self, ids: &[u32], logits: bool) -> ft_base::Result<Option<Tensor>> {
        let (n, past) = (ids.len(), self.seen.len());
        let positions: Vec<u32> = (past..past + n).map(|p| p as u32).collect();
        let host = HostBatch { ids, positions: &positions, docs: &[past + n], targets: &[] };
        let Batch { ids: sent, context: ctx, .. } =
            Batch::new(&self.decoder.config, host, (0, 0), None, self.device)?;
        let mut visits = Outline::of(self.decoder).forward();
        if !logits {
            // the head comes last
            visits.pop();
        }
        let mut pass = Pass::begin(visits, self.hooks)?;
        pass.arrive()?;
        let mut x = self.decoder.embedding.forward(&sent)?;
        pass.leave()?;
        for (layer, cache) in self.decoder.layers.iter().zip(&mut self.caches) {
            pass.arrive()?;
            x = layer.forward(&x, &ctx, Some(cache), None)?.0;
            pass.leave()?;
        }
        self.seen.extend(ids);
        if !logits {
            return Ok(None);
        }
        pass.arrive()?;
        let logits = self.decoder.head.logits(&x.narrow(0, n - 1, 1)?.contiguous()?, &ctx)?;
        pass.leave()?;
        Ok(Some(logits))
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
        self.caches.iter_mut().for_each(|cache| cache.truncate(keep));
        self.seen.truncate(keep);
        self.read(&ids[keep..])
    }
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
    let mut logits = reader.read_document(prompt)?;
    let mut text = tokenizer.decoder(true);
    let mut out = Reply::default();
    for left in (0..max_tokens).rev() {
        let next = sampler.sample(&logits)?;
        if tokenizer.eos().contains(&next) {
            out.ended = true;
            break;
        }
        out.tokens += 1;
        if let Some(piece) = text.step(next)? {
            out.text.push_str(&piece);
            if !on_text(&piece) {
                break;
            }
        }
        if left > 0 {
            logits = reader.read(&[next])?;
        }
    }
    Ok(out)
}
