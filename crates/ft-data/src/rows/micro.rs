//! Model input.

use super::dataset::Dataset;
use crate::error::Error;
use crate::shape::example::{Example, IGNORE_INDEX};

/// A micro-batch without padding: the concatenated documents of all rows.
///
/// Documents are isolated: positions restart at 0, and a token attends only to itself and to earlier tokens
/// of the same document. Packed and unpacked rows are therefore equivalent to the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Micro {
    /// Token ids, length `n`.
    pub ids: Vec<u32>,
    /// Position of every token within the document, from 0; length `n`.
    pub positions: Vec<u32>,
    /// Document lengths in order, with sum `n`.
    pub docs: Vec<usize>,
    /// Targets: the index of a token, and the id of the next token. Labels are shifted only here, never
    /// across documents.
    pub targets: Vec<(u32, u32)>,
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
            targets: Vec::new(),
        }
    }
}

/// Size of a micro-batch, computed without building it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Number of tokens.
    pub tokens: usize,
    /// Number of targets.
    pub targets: usize,
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
        let mut out = Self {
            ids: Vec::with_capacity(size.tokens),
            positions: Vec::with_capacity(size.tokens),
            docs: Vec::new(),
            targets: Vec::with_capacity(size.targets),
        };
        for row in rows {
            for i in dataset.rows.get(*row)? {
                let Some(example) = dataset.samples.get(i as usize)? else { continue };
                out.append(&example);
            }
        }
        Ok(out)
    }

    fn append(&mut self, example: &Example) {
        let base = self.ids.len() as u32;
        self.ids.extend(&example.ids);
        self.positions.extend(0..example.ids.len() as u32);
        self.docs.push(example.ids.len());
        let next = example.labels.iter().skip(1).enumerate();
        let supervised = next.filter(|(_, label)| **label != IGNORE_INDEX);
        self.targets.extend(supervised.map(|(i, label)| (base + i as u32, label.unsigned_abs())));
    }
}
