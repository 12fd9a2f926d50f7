//! A sample as ids and labels, no longer than allowed, or the reason why it is left out.

use super::error::Problem;
use super::format::{Sample, Shape};
use super::tokenizer::{Encoded, Tokenizer};
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

impl Encoder<'_> {
    /// The row's example, and whether it was cut.
    pub fn encode(&self, row: serde_json::Value, line: usize) -> Result<(Example, bool), Problem> {
        let sample = self.shape.sample(row).map_err(Problem::Bad)?;
        let (mut ids, mut labels) = self.tokens(sample).map_err(Problem::Bad)?;
        self.check(&ids, &labels).map_err(Problem::Bad)?;
        let targets = |labels: &[i32]| labels.iter().skip(1).any(|l| *l != UNSUPERVISED);
        if ids.is_empty() {
            return Err(Problem::Bad("the row has no tokens".into()));
        }
        if !targets(&labels) {
            let why = if ids.len() == 1 {
                "one token alone has no token before it to predict it".into()
            } else if labels[0] != UNSUPERVISED {
                "only its first token is, and no token before it could predict it".into()
            } else {
                format!("none of its {} tokens", ids.len())
            };
            return Err(Problem::EmptyMask(why));
        }
        let (tokens, max) = (ids.len(), self.data.max_length);
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

    fn tokens(&self, sample: Sample) -> Result<(Vec<u32>, Vec<i32>), String> {
        let (text, spans, end) = match sample {
            Sample::Tokens { ids, labels } => return Ok((ids, labels)),
            Sample::Text { text, from } => (text, Some(from), true),
            Sample::Chat { messages, tools } => return self.chat(&messages, tools.as_ref()),
        };
        let tokenizer = self.tokenizer.ok_or("there is no tokenizer")?;
        let from = spans.unwrap_or(0);
        let encoded = tokenizer.encode_with_offsets(&text).map_err(|e| e.to_string())?;
        // What the tokenizer itself puts before a text is there as in pre-training, and nothing predicts it.
        let whole = from == 0 && self.shape.mask == Mask::None;
        let mut ids = tokenizer.text_start().to_vec();
        let mut labels: Vec<i32> = ids.iter().map(|i| if whole { label(*i) } else { UNSUPERVISED }).collect();
        let supervised = mask(&encoded, std::slice::from_ref(&(from..text.len())));
        labels.extend(
            encoded.ids.iter().zip(supervised).map(|(i, s)| if s { label(*i) } else { UNSUPERVISED }),
        );
        ids.extend(&encoded.ids);
        if end {
            let eos = tokenizer.text_end().ok_or("the tokenizer has no end-of-sequence token")?;
            ids.push(eos);
            labels.push(label(eos));
        }
        Ok((ids, labels))
    }

    fn chat(
        &self,
        messages: &[serde_json::Value],
        tools: Option<&serde_json::Value>,
    ) -> Result<(Vec<u32>, Vec<i32>), String> {
        let tokenizer = self.tokenizer.ok_or("there is no tokenizer")?;
        let vars = &self.data.template;
        if self.shape.mask == Mask::None {
            let messages = serde_json::Value::Array(messages.to_vec());
            let text = tokenizer.render(&messages, tools, false, vars).map_err(|e| e.to_string())?;
            let ids = tokenizer.encode(&text).map_err(|e| e.to_string())?;
            let labels = ids.iter().map(|i| label(*i)).collect();
            return Ok((ids, labels));
        }
        let (text, spans) = tokenizer.render_with_spans(messages, tools, vars).map_err(|e| e.to_string())?;
        let encoded = tokenizer.encode_with_offsets(&text).map_err(|e| e.to_string())?;
        let supervised = mask(&encoded, &spans);
        let labels = encoded
            .ids
            .iter()
            .zip(supervised)
            .map(|(i, s)| if s { label(*i) } else { UNSUPERVISED })
            .collect();
        Ok((encoded.ids, labels))
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

/// For each token whether its first byte lies in one of the spans, which are in order.
pub(super) fn mask(encoded: &Encoded, spans: &[Range<usize>]) -> Vec<bool> {
    let within = |at: usize| {
        let next = spans.partition_point(|s| s.end <= at);
        spans.get(next).is_some_and(|s| s.start <= at)
    };
    encoded.offsets.iter().map(|&(start, _)| within(start)).collect()
}
