//! A sample as ids and labels, no longer than allowed, or the reason why it is left out.

use super::error::Problem;
use super::format::{Sample, Shape};
use super::markers;
use super::messages::Chat;
use super::notes::Note;
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

/// A row that was read.
pub(super) struct Read {
    pub example: Example,
    /// Whether it was cut.
    pub cut: bool,
    /// What to tell about it.
    pub notes: Vec<Note>,
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
    /// The row's example.
    pub fn encode(&self, row: serde_json::Value, line: usize) -> Result<Read, Problem> {
        let mut notes = Vec::new();
        let sample = self.shape.sample(row, &mut notes).map_err(Problem::Bad)?;
        let (mut ids, mut labels) = self.tokens(sample, &mut notes).map_err(Problem::Bad)?;
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
        Ok(Read { example: Example { ids, labels, source: self.source, line }, cut, notes })
    }

    fn tokens(&self, sample: Sample, notes: &mut Vec<Note>) -> Result<(Vec<u32>, Vec<i32>), String> {
        let turns = match sample {
            Sample::Tokens { ids, labels } => return Ok((ids, labels)),
            Sample::Text(turns) => turns,
            Sample::Chat(chat) => return self.chat(&chat, notes),
        };
        let tokenizer = self.tokenizer.ok_or("there is no tokenizer")?;
        let eos = tokenizer.text_end().ok_or("the tokenizer has no end-of-sequence token")?;
        // What the tokenizer itself puts before a text is there as in pre-training, and nothing predicts it.
        let whole = self.shape.mask == Mask::None;
        let mut ids = tokenizer.text_start().to_vec();
        let mut labels: Vec<i32> = ids.iter().map(|i| if whole { label(*i) } else { UNSUPERVISED }).collect();
        for (text, from) in turns {
            let encoded = tokenizer.encode_with_offsets(&text).map_err(|e| e.to_string())?;
            labels.extend(self.labels(&encoded, std::slice::from_ref(&(from..text.len())), notes));
            labels.push(label(eos));
            ids.extend(encoded.ids);
            ids.push(eos);
        }
        Ok((ids, labels))
    }

    fn chat(&self, chat: &Chat, notes: &mut Vec<Note>) -> Result<(Vec<u32>, Vec<i32>), String> {
        let tokenizer = self.tokenizer.ok_or("there is no tokenizer")?;
        let supervise = self.shape.mask != Mask::None;
        let (text, mut spans) = tokenizer.conversation(chat, &self.data.template, supervise, notes)?;
        if !supervise {
            spans = std::iter::once(0..text.len()).collect();
        }
        let encoded = tokenizer.encode_with_offsets(&text).map_err(|e| e.to_string())?;
        markers::note(&text, &encoded, chat, tokenizer.specials(), notes);
        let labels = self.labels(&encoded, &spans, notes);
        Ok((encoded.ids, labels))
    }

    fn labels(&self, encoded: &Encoded, spans: &[Range<usize>], notes: &mut Vec<Note>) -> Vec<i32> {
        if markers::cuts(encoded, spans) {
            notes.push(Note::Edge);
        }
        let supervised = mask(encoded, spans);
        encoded.ids.iter().zip(supervised).map(|(i, s)| if s { label(*i) } else { UNSUPERVISED }).collect()
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

/// For each token whether it lies in one of the spans, which are in order: a token that reaches over an edge holds text
/// that is not to be learnt.
pub(super) fn mask(encoded: &Encoded, spans: &[Range<usize>]) -> Vec<bool> {
    let within = |start: usize, end: usize| {
        let next = spans.partition_point(|s| s.end <= start);
        spans.get(next).is_some_and(|s| s.start <= start && end <= s.end)
    };
    encoded.offsets.iter().map(|&(start, end)| within(start, end)).collect()
}
