//! Generation, token by token, with cached keys and values; adapters stay unmerged.

use crate::data::Tokenizer;
use crate::kernel::attention::Sequences;
use crate::model::Decoder;
use crate::model::attention::Cache;
use crate::model::decoder::Context;
use candle_core::{Device, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling};

/// Tokens of a sample reply at the most.
pub const SAMPLE_TOKENS: usize = 64;

/// A model with the keys and values of what it has read so far.
pub struct Reader<'a> {
    decoder: &'a Decoder,
    device: &'a Device,
    caches: Vec<Cache>,
    past: usize,
}

impl<'a> Reader<'a> {
    /// A reader that has read nothing.
    pub fn new(decoder: &'a Decoder, device: &'a Device) -> Self {
        let caches = decoder.layers.iter().map(|_| Cache::default()).collect();
        Self { decoder, device, caches, past: 0 }
    }

    /// Tokens read so far.
    pub fn len(&self) -> usize {
        self.past
    }

    /// Whether nothing was read yet.
    pub fn is_empty(&self) -> bool {
        self.past == 0
    }

    /// Reads tokens and gives the logits after the last, `[v]` in f32.
    ///
    /// # Errors
    /// No tokens; a tensor operation that fails.
    pub fn read(&mut self, ids: &[u32]) -> crate::Result<Tensor> {
        let n = ids.len();
        if n == 0 {
            return Err(candle_core::Error::Msg("nothing to read".into()).into());
        }
        let positions: Vec<u32> = (self.past..self.past + n).map(|p| p as u32).collect();
        let c = &self.decoder.config;
        let (cos, sin) = c.rope.tables(c.head_dim, &positions, self.device)?;
        let seqs = Sequences::new(&[self.past + n], self.past, self.device)?;
        let ctx = Context { seqs, cos, sin, dropout: None };
        let mut x = self.decoder.embedding.forward(&Tensor::new(ids, self.device)?)?;
        for (layer, cache) in self.decoder.layers.iter().zip(&mut self.caches) {
            x = layer.forward(&x, &ctx, Some(cache))?.0;
        }
        self.past += n;
        Ok(self.decoder.head.logits(&x.narrow(0, n - 1, 1)?.contiguous()?, &ctx)?.squeeze(0)?)
    }
}

/// Takes the most likely token each time.
pub fn greedy() -> LogitsProcessor {
    LogitsProcessor::from_sampling(0, Sampling::ArgMax)
}

/// Answers a prompt: text up to an end-of-sequence token or `max_tokens`; `on_text` gets it piece by piece.
pub fn reply(
    decoder: &Decoder,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    max_tokens: usize,
    sampler: &mut LogitsProcessor,
    device: &Device,
    on_text: &mut dyn FnMut(&str),
) -> crate::Result<String> {
    let mut reader = Reader::new(decoder, device);
    let mut logits = reader.read(prompt)?;
    let mut text = tokenizer.decoder(true);
    let mut out = String::new();
    for _ in 0..max_tokens {
        let next = sampler.sample(&logits)?;
        if tokenizer.eos().contains(&next) {
            break;
        }
        if let Some(piece) = text.step(next)? {
            on_text(&piece);
            out.push_str(&piece);
        }
        logits = reader.read(&[next])?;
    }
    Ok(out)
}
