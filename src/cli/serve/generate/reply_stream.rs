//! One reply: sampling, stop strings, log-probabilities, the echo of the prompt.

use super::job::{FinishReason, Generation, Prompt, random};
use super::scores::Token;
use super::stop::StopStrings;
use crate::infer::sampling::Sampler;
use candle_core::DType;
use ft_data::{Decoder, Tokenizer};
use ft_engine::walk::generate::{self, Reader, Writer};
use ft_kernels::Real;

/// Tokens of the prompt read by a decoder before a continued text, for the space between both.
const CONTEXT: usize = 8;
/// Tokens that a decoder may hold back; a character has fewer.
const HELD: usize = 16;

/// Receives text and tokens; returns whether to continue.
pub(super) type Send<'a> = &'a mut dyn FnMut(String, Vec<Token>) -> bool;

/// Generates the reply to one prompt.
///
/// # Errors
/// A failed tensor operation; tokens not decodable to text.
pub(super) fn reply(
    reader: &mut Reader<'_>,
    tokenizer: &Tokenizer,
    g: &Generation,
    prompt: &Prompt,
    send: Send<'_>,
) -> ft_base::Result<(FinishReason, usize)> {
    let mut text = Text::new(tokenizer);
    let mut logits = None;
    let mut written = 0;
    if g.echo {
        let offsets = text.read_all(&prompt.ids)?;
        let whole = prompt.text.as_ref().unwrap_or(&text.all);
        written = whole.chars().count();
        let mut tokens = Vec::new();
        if let Some(alternatives) = g.logprobs {
            (tokens, logits) = scored(reader, tokenizer, &prompt.ids, &offsets, alternatives, send)?;
            if logits.is_none() {
                return Ok((FinishReason::Length, 0));
            }
        }
        if !send(whole.clone(), tokens) {
            return Ok((FinishReason::Length, 0));
        }
    } else if g.continues {
        text.read_all(&prompt.ids[prompt.ids.len().saturating_sub(CONTEXT)..])?;
    }
    let most = g.max_tokens.min(g.context.saturating_sub(prompt.ids.len()));
    if most == 0 {
        return Ok((FinishReason::Length, 0));
    }
    let logits = match logits {
        Some(logits) => logits,
        None => reader.read_document(&prompt.ids)?,
    };
    let mut stream = ReplyStream {
        tokenizer,
        sampler: Sampler::new(g.seed.unwrap_or_else(random), g.sampling.clone(), g.repetition_penalty),
        seen: prompt.ids.clone(),
        logprobs: g.logprobs,
        stops: StopStrings::new(g.stop.clone()),
        written,
        sent: written,
        waiting: Vec::new(),
        send,
    };
    let reply = generate::reply(reader, tokenizer, logits, text.decoder, most, &mut stream)?;
    let stopped = stream.finish() || reply.ended;
    Ok((if stopped { FinishReason::Stop } else { FinishReason::Length }, reply.tokens))
}

/// Tokens of a prompt with log-probabilities, and the logits after it; `None` if `send` wants no more.
fn scored(
    reader: &mut Reader<'_>,
    tokenizer: &Tokenizer,
    ids: &[u32],
    offsets: &[usize],
    alternatives: usize,
    send: Send<'_>,
) -> ft_base::Result<(Vec<Token>, Option<Real>)> {
    let mut tokens = Vec::with_capacity(ids.len());
    let mut failed = None;
    if let Some(id) = ids.first() {
        tokens.push(Token::first(tokenizer, *id)?);
    }
    let mut on_row = |row: &[f32]| {
        let at = tokens.len();
        if let (Some(id), Some(offset)) = (ids.get(at), offsets.get(at)) {
            match Token::new(tokenizer, *id, *offset, row, alternatives) {
                Ok(token) => tokens.push(token),
                Err(e) => failed = Some(e),
            }
        }
        failed.is_none() && send(String::new(), Vec::new())
    };
    let logits = reader.score(ids, &mut on_row)?;
    failed.map_or(Ok((tokens, logits)), |e| Err(e.into()))
}

/// Decoded text of a prompt.
struct Text<'a> {
    decoder: Decoder<'a>,
    all: String,
}

impl<'a> Text<'a> {
    fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { decoder: tokenizer.decoder(true), all: String::new() }
    }

    /// Appends tokens; returns the characters before each. Bytes that make no character end a word, as their decoder
    /// would wait for the rest without end.
    fn read_all(&mut self, ids: &[u32]) -> Result<Vec<usize>, ft_data::Error> {
        let mut offsets = Vec::with_capacity(ids.len());
        let mut count = 0;
        for id in ids {
            offsets.push(count);
            let piece = match self.decoder.step(*id)? {
                Some(piece) => piece,
                None if self.decoder.held() < HELD => continue,
                None => self.decoder.flush()?,
            };
            count += piece.chars().count();
            self.all.push_str(&piece);
        }
        Ok(offsets)
    }
}

/// Samples the tokens of a reply, and sends its text up to a stop string.
struct ReplyStream<'a> {
    tokenizer: &'a Tokenizer,
    sampler: Sampler,
    /// Tokens of prompt and reply.
    seen: Vec<u32>,
    logprobs: Option<usize>,
    stops: StopStrings,
    /// Characters generated, with the echo.
    written: usize,
    /// Characters sent, with the echo.
    sent: usize,
    /// Tokens not sent yet.
    waiting: Vec<Token>,
    send: Send<'a>,
}

impl ReplyStream<'_> {
    /// Sends a text with the tokens that begin in it.
    fn send(&mut self, text: String) -> bool {
        self.sent += text.chars().count();
        let ready = self.waiting.iter().take_while(|t| t.offset < self.sent).count();
        (self.send)(text, self.waiting.drain(..ready).collect())
    }

    /// Sends the rest. Returns whether a stop string ended the reply.
    fn finish(mut self) -> bool {
        if !self.stops.hit {
            (self.send)(self.stops.rest(), self.waiting);
        }
        self.stops.hit
    }
}

impl Writer for ReplyStream<'_> {
    fn choose(&mut self, logits: &Real) -> ft_base::Result<u32> {
        let id = self.sampler.draw(logits, &mut self.seen)?;
        if let Some(alternatives) = self.logprobs {
            let row: Vec<f32> = logits.to_dtype(DType::F32)?.to_vec1()?;
            self.waiting.push(Token::new(self.tokenizer, id, self.written, &row, alternatives)?);
        }
        Ok(id)
    }

    fn write(&mut self, piece: &str) -> bool {
        self.written += piece.chars().count();
        let (text, go_on) = self.stops.push(piece);
        self.send(text) && go_on
    }
}
