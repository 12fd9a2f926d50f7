//! Model input.

pub(crate) mod segments;

use super::dataset::Dataset;
use crate::error::Error;
use crate::shape::example::{Content, Example, Teacher};

/// A micro-batch without padding: the concatenated documents of all rows.
///
/// Documents are isolated: positions restart at 0, and a token attends only to itself and to earlier tokens
/// of the same document. Packed and unpacked rows are therefore equivalent to the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Micro {
    /// Token ids, length `n`.
    pub ids: Vec<u32>,
    /// Position of every token within the document, from 0; length `n`.
    pub positions: Vec<u32>,
    /// Document lengths in order, with sum `n`.
    pub docs: Vec<usize>,
    /// Targets: the index of a token, and the id of the next token. Labels are shifted only here, never
    /// across documents. Of scored documents: the index of the last token, and the class.
    pub targets: Vec<(u32, u32)>,
    /// Weights of the targets; empty for weights of 1.
    pub weights: Vec<f32>,
    /// Values of a teacher for each target, if the samples have any.
    pub teacher: Teacher,
    /// Sample numbers in order, with their contents.
    pub samples: Vec<(u32, Content)>,
}

/// Number of tokens to compare logits for when verifying written files. Small, since the logits of a token
/// span the vocabulary in f64.
pub const PROBE_TOKENS: usize = 16;

impl Micro {
    /// The first tokens of the first document, for comparing logits at low cost.
    pub fn probe(&self) -> Micro {
        let n = self.docs.first().copied().unwrap_or(0).min(PROBE_TOKENS);
        Micro {
            ids: self.ids[..n].to_vec(),
            positions: self.positions[..n].to_vec(),
            docs: vec![n],
            ..Self::default()
        }
    }
}

/// Size of a micro-batch, computed without building it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Size {
    /// Number of tokens.
    pub tokens: usize,
    /// Number of targets.
    pub targets: usize,
    /// Sum of the weights of the targets.
    pub weight: f64,
    /// Number of samples.
    pub samples: usize,
}

impl Size {
    /// Size of the given rows; ignores rows out of range.
    ///
    /// # Errors
    /// A token or row file that can no longer be read.
    pub fn of(dataset: &Dataset, rows: &[usize]) -> Result<Self, Error> {
        let (mut size, mut reader) = (Self::default(), dataset.rows.reader(&dataset.samples));
        for row in rows {
            for item in reader.items(*row)? {
                size.tokens += item.tokens as usize;
                size.targets += item.targets as usize;
                size.weight += item.weight;
                size.samples += 1;
            }
        }
        Ok(size)
    }
}

impl Micro {
    /// Builds the micro-batch of the given rows; ignores rows out of range.
    ///
    /// Indices have 32 bits: a micro-batch has fewer than 2^32 tokens.
    ///
    /// # Errors
    /// A token file that can no longer be read.
    pub fn collate(dataset: &Dataset, rows: &[usize]) -> Result<Self, Error> {
        let size = Size::of(dataset, rows)?;
        let (ids, positions) = (Vec::with_capacity(size.tokens), Vec::with_capacity(size.tokens));
        let targets = Vec::with_capacity(size.targets);
        let mut out = Self { ids, positions, targets, ..Self::default() };
        for row in rows {
            for i in dataset.rows.get(*row)? {
                let Some(example) = dataset.samples.get(i as usize)? else { continue };
                out.append(i, &example);
            }
        }
        Ok(out)
    }

    /// Builds the micro-batch of the given samples.
    ///
    /// # Errors
    /// As [`Micro::collate`].
    pub fn of_samples(dataset: &Dataset, samples: &[u32]) -> Result<Self, Error> {
        let mut out = Self::default();
        for i in samples {
            let Some(example) = dataset.samples.get(*i as usize)? else { continue };
            out.append(*i, &example);
        }
        Ok(out)
    }

    /// Builds the micro-batch of prompts with the completions of other samples, as pairs of sample numbers. Cuts
    /// a document at `limit` tokens.
    ///
    /// # Errors
    /// As [`Micro::collate`].
    pub fn crossed(dataset: &Dataset, pairs: &[[u32; 2]], limit: usize) -> Result<Self, Error> {
        let mut out = Self::default();
        for [prompt, completion] in pairs {
            let (prompt, completion) = (*prompt as usize, *completion as usize);
            let (Some(x), Some(y)) = (dataset.samples.get(prompt)?, dataset.samples.get(completion)?) else {
                continue;
            };
            let (asked, answered) = (x.prompt(), y.prompt());
            let join = |a: &[u32], b: &[u32]| a.iter().chain(b).take(limit).copied().collect();
            let ids = join(&x.ids[..asked], &y.ids[answered..]);
            let labels = x.labels[..asked].iter().chain(&y.labels[answered..]).take(limit).copied().collect();
            out.append(prompt as u32, &Example { ids, labels, ..Example::default() });
        }
        Ok(out)
    }

    fn append(&mut self, number: u32, example: &Example) {
        let base = self.ids.len() as u32;
        self.ids.extend(&example.ids);
        for document in example.documents() {
            self.positions.extend(0..document.len() as u32);
            self.docs.push(document.len());
        }
        if !example.weights.is_empty() {
            // samples before without weights
            self.weights.resize(self.targets.len(), 1.0);
            self.weights.extend(example.queries().map(|i| example.weights[example.label_of(i)]));
        }
        let (before, added) = (self.targets.len(), example.targets());
        self.teacher.extend(before, added, &example.teacher);
        let label = |i: usize| example.labels[example.label_of(i)].unsigned_abs();
        let target = |i: usize| (base + i as u32, label(i));
        self.targets.extend(example.queries().map(target));
        if !self.weights.is_empty() {
            self.weights.resize(self.targets.len(), 1.0);
        }
        self.samples.push((number, example.content));
    }
}
