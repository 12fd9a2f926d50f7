//! A sample as ids and labels, no longer than allowed, or the reason why it is left out.

use super::error::{Error, Problem};
use super::format::{Sample, Shape};
use super::tokenizer::{Tokenizer, is_within};
use crate::recipe::{self, Mask, OverLength};
use std::ops::Range;

/// The label of a token that is not supervised.
pub const UNSUPERVISED: i32 = -100;

/// A tokenized sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// Token ids, at least one.
    pub ids: Vec<u32>,
    /// For each id, itself where it is supervised, else [`UNSUPERVISED`]; not shifted.
    pub labels: Vec<i32>,
    /// Which source of the list it comes from.
    pub source: usize,
    /// Its line in the file.
    pub line: usize,
}

impl Example {
    /// Targets of the loss: supervised tokens that another token stands before.
    pub fn targets(&self) -> usize {
        self.labels.iter().skip(1).filter(|l| **l != UNSUPERVISED).count()
    }
}

/// What samples of one source are encoded with.
pub(super) struct Encoder<'a> {
    pub shape: &'a Shape,
    pub data: &'a recipe::Data,
    pub tokenizer: Option<&'a Tokenizer>,
    pub vocab_size: usize,
    pub source: usize,
}

/// The first tokens of a sample, and what is known of the rest.
struct Tokens {
    ids: Vec<u32>,
    labels: Vec<i32>,
    /// How many there are in all.
    total: usize,
    /// Whether one of the rest is supervised.
    more_targets: bool,
}

impl Encoder<'_> {
    /// The row's example, and whether it was cut.
    pub fn encode(&self, row: serde_json::Value, line: usize) -> Result<(Example, bool), Problem> {
        let sample = self.shape.sample(row).map_err(Problem::Bad)?;
        let Tokens { mut ids, mut labels, total, more_targets } = self.tokens(sample)?;
        self.check(&ids, &labels).map_err(Problem::Bad)?;
        let targets = |labels: &[i32]| labels.iter().skip(1).any(|l| *l != UNSUPERVISED);
        if ids.is_empty() {
            return Err(Problem::Bad("the row has no tokens".into()));
        }
        if !targets(&labels) && !more_targets {
            let why = if total == 1 {
                "one token alone has no token before it to predict it".into()
            } else if labels[0] != UNSUPERVISED {
                "only its first token is, and no token before it could predict it".into()
            } else {
                format!("none of its {total} tokens")
            };
            return Err(Problem::EmptyMask(why));
        }
        let (tokens, max) = (total, self.data.max_length);
        let cut = tokens > max;
        if cut {
            match self.data.over_length {
                OverLength::Drop | OverLength::Error => return Err(Problem::TooLong { tokens, max }),
                OverLength::Truncate => {
                    ids.truncate(max);
                    labels.truncate(max);
                }
            }
            if !targets(&labels) {
                return Err(Problem::EmptyAfterTruncation { tokens, max });
            }
        }
        Ok((Example { ids, labels, source: self.source, line }, cut))
    }

    fn tokens(&self, sample: Sample) -> Result<Tokens, Problem> {
        let (text, from) = match sample {
            Sample::Tokens { ids, labels } => {
                return Ok(Tokens { total: ids.len(), ids, labels, more_targets: false });
            }
            Sample::Text { text, from } => (text, from),
            Sample::Chat { messages, tools } => return self.chat(&messages, tools.as_ref()),
        };
        let tokenizer = self.tokenizer.ok_or_else(no_tokenizer)?;
        // What the tokenizer itself puts before a text is there as in pre-training, and nothing predicts it.
        let whole = from == 0 && self.shape.mask == Mask::None;
        let start = tokenizer.text_start();
        let labels = start.iter().map(|i| if whole { label(*i) } else { UNSUPERVISED }).collect();
        let mut out = Tokens { ids: start.to_vec(), labels, total: start.len(), more_targets: false };
        self.encoded(tokenizer, &text, std::slice::from_ref(&(from..text.len())), &mut out)?;
        let eos = tokenizer
            .text_end()
            .ok_or_else(|| Problem::Bad("the tokenizer has no end-of-sequence token".into()))?;
        if out.total == out.ids.len() {
            out.ids.push(eos);
            out.labels.push(label(eos));
        } else {
            out.more_targets = true;
        }
        out.total += 1;
        Ok(out)
    }

    fn chat(
        &self,
        messages: &[serde_json::Value],
        tools: Option<&serde_json::Value>,
    ) -> Result<Tokens, Problem> {
        let tokenizer = self.tokenizer.ok_or_else(no_tokenizer)?;
        let vars = &self.data.template;
        let (text, spans) = if self.shape.mask == Mask::None {
            let messages = serde_json::Value::Array(messages.to_vec());
            let text = tokenizer.render(&messages, tools, false, vars).map_err(problem)?;
            let all = 0..text.len();
            (text, vec![all])
        } else {
            tokenizer.render_with_spans(messages, tools, vars).map_err(problem)?
        };
        let mut out = Tokens { ids: Vec::new(), labels: Vec::new(), total: 0, more_targets: false };
        self.encoded(tokenizer, &text, &spans, &mut out)?;
        Ok(out)
    }

    /// Appends the tokens of a text, supervised where they begin in one of `spans`: no more of them than one beyond
    /// `max_length`, because more are never used.
    fn encoded(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        spans: &[Range<usize>],
        out: &mut Tokens,
    ) -> Result<(), Problem> {
        let keep = self.data.max_length.saturating_add(1).saturating_sub(out.ids.len());
        let encoded = tokenizer.encode_first(text, keep, spans).map_err(problem)?;
        let all = self.shape.mask == Mask::None;
        out.labels.extend(
            encoded
                .ids
                .iter()
                .zip(&encoded.starts)
                .map(|(id, start)| if all || is_within(spans, *start) { label(*id) } else { UNSUPERVISED }),
        );
        out.ids.extend(encoded.ids);
        out.total += encoded.total;
        out.more_targets = encoded.more_within;
        Ok(())
    }

    fn check(&self, ids: &[u32], labels: &[i32]) -> Result<(), String> {
        let size = self.vocab_size;
        let out = |i: u64| format!("token id {i} is not in the model's vocabulary of {size}");
        if let Some(&id) = ids.iter().find(|i| **i as usize >= size) {
            return Err(out(u64::from(id)));
        }
        match labels.iter().find(|l| **l != UNSUPERVISED && (**l < 0 || **l as usize >= size)) {
            Some(&l) => Err(format!("label {}", out(u64::from(l.unsigned_abs())))),
            None => Ok(()),
        }
    }
}

/// Ids beyond `i32` are refused by the check of the vocabulary, which comes after.
fn label(id: u32) -> i32 {
    i32::try_from(id).unwrap_or(i32::MAX)
}

fn no_tokenizer() -> Problem {
    Problem::Bad("there is no tokenizer".into())
}

/// A row whose text the tokenizer or the template does not take.
fn problem(e: Error) -> Problem {
    match e {
        Error::Tokenizer { .. } => Problem::Tokenizer(e.to_string()),
        e => Problem::Bad(e.to_string()),
    }
}
