//! Generation, token by token, with cached keys and values; adapters stay unmerged.

use super::visit::{Around, Nothing, Outline, Pass};
use ft_data::Tokenizer;
use ft_kernels::{Real, Tensor, to_host};
use crate::model::attention::Cache;
use crate::model::batch::HostBatch;
use crate::model::{Batch, Decoder};
use candle_core::Device;
use candle_transformers::generation::{LogitsProcessor, Sampling};

/// Tokens of a sample reply at the most.
pub const SAMPLE_TOKENS: usize = 64;
/// Tokens of a prompt that are read at a time: what a pass takes beside the cache does not grow with the prompt.
pub const PART: usize = 2048;

/// A model with the keys and values of what it has read so far: one document.
///
/// Keys and values take memory as tokens come, a block of [`Cache`] at a time; nothing that was read is moved or read again.
pub struct Reader<'a> {
    decoder: &'a Decoder,
    device: &'a Device,
    caches: Vec<Cache>,
    seen: Vec<u32>,
    around: &'a dyn Around,
}

impl<'a> Reader<'a> {
    /// A reader that has read nothing.
    pub fn new(decoder: &'a Decoder, device: &'a Device) -> Self {
        Self { decoder, device, caches: Vec::new(), seen: Vec::new(), around: &Nothing }.within(usize::MAX)
    }

    /// For a document of so many tokens at the most, which takes no more than these do.
    pub fn within(self, tokens: usize) -> Self {
        let caches = self.decoder.layers.iter().map(|_| Cache::new(tokens)).collect();
        Self { caches, seen: Vec::new(), ..self }
    }

    /// With what goes on around its visits to the units.
    pub fn around(self, around: &'a dyn Around) -> Self {
        Self { around, ..self }
    }

    /// Tokens read so far.
    pub fn len(&self) -> usize {
        self.seen.len()
    }

    /// Whether nothing was read yet.
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// Reads tokens and gives the logits after the last, `[v]` in f32, on the host.
    ///
    /// # Errors
    /// No tokens; logits that are not finite; a tensor operation that fails.
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
        // what is drawn from them is drawn on the host
        let logits = to_host(&logits.real()?.squeeze(0)?)?;
        // nothing can be drawn from them
        super::finite(
            &logits,
            "the model",
            "hint: its weights, or its adapter's, have diverged or are damaged",
        )?;
        Ok(logits)
    }

    /// Takes tokens through the model: the logits after the last of them, [1, v], where they are wanted.
    fn pass(&mut self, ids: &[u32], logits: bool) -> ft_base::Result<Option<Tensor>> {
        let (n, past) = (ids.len(), self.seen.len());
        let positions: Vec<u32> = (past..past + n).map(|p| p as u32).collect();
        let host = HostBatch { ids, positions: &positions, docs: &[past + n], targets: &[] };
        let Batch { ids: sent, context: ctx, .. } =
            Batch::new(&self.decoder.config, host, (0, 0), None, self.device)?;
        let mut visits = Outline::of(self.decoder).forward();
        if !logits {
            // the head is the last
            visits.pop();
        }
        let mut pass = Pass::begin(visits, self.around)?;
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

    /// Reads a whole document and gives the logits after its last token. What it has in common with the
    /// beginning of what was read is not read again; the rest is forgotten.
    ///
    /// # Errors
    /// As [`Reader::read`].
    pub fn read_document(&mut self, ids: &[u32]) -> ft_base::Result<Real> {
        let common = self.seen.iter().zip(ids).take_while(|(a, b)| a == b).count();
        // the logits after the last token need that token
        let keep = common.min(ids.len().saturating_sub(1));
        self.caches.iter_mut().for_each(|cache| cache.truncate(keep));
        self.seen.truncate(keep);
        self.read(&ids[keep..])
    }
}

/// Takes the most likely token each time.
pub fn greedy() -> LogitsProcessor {
    LogitsProcessor::from_sampling(0, Sampling::ArgMax)
}

/// What a model answered.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// The text.
    pub text: String,
    /// Tokens that it took, without one that ended it.
    pub tokens: usize,
    /// Whether an end-of-sequence token ended it.
    pub ended: bool,
}

/// Answers a prompt: text up to an end-of-sequence token or `max_tokens`; `on_text` gets it piece by piece and
/// says whether to go on.
///
/// # Errors
/// An empty prompt, a tensor operation that fails, tokens that make no text.
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
