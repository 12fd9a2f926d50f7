//! What enters the model.

use super::encode::UNSUPERVISED;
use super::{Dataset, Error};

/// One micro-batch without padding: all documents of its rows end to end.
///
/// Documents never see each other: positions begin again at each, and a token attends to itself and to the earlier tokens
/// of its document alone. So a row with one document and a packed row are the same to the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Micro {
    /// Token ids.
    pub ids: Vec<u32>,
    /// For each token its position inside its document, from 0.
    pub positions: Vec<u32>,
    /// Lengths of the documents, in order; their sum is the number of tokens.
    pub docs: Vec<usize>,
    /// What the loss asks for: the index of a token, and the id that is to follow it. The shift of labels is here
    /// and nowhere else, and never reaches from one document into the next.
    pub targets: Vec<(u32, u32)>,
}

/// Tokens whose logits are compared where something that was written is checked: few, because each has a whole vocabulary
/// of them, in f64.
pub const PROBE_TOKENS: usize = 16;

impl Micro {
    /// The beginning of the first document: enough to compare logits, and small whatever the vocabulary.
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

/// How large the micro-batch of some rows is, counted without making it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Tokens.
    pub tokens: usize,
    /// Supervised targets.
    pub targets: usize,
}

impl Size {
    /// Of these rows, those that the dataset does not have left out.
    pub fn of(dataset: &Dataset, rows: &[usize]) -> Self {
        let all = samples(dataset, rows);
        all.fold(Self::default(), |s, i| Self {
            tokens: s.tokens + dataset.samples.tokens(i),
            targets: s.targets + dataset.samples.targets(i),
        })
    }
}

/// The samples of some rows, in order.
fn samples<'a>(dataset: &'a Dataset, rows: &'a [usize]) -> impl Iterator<Item = usize> {
    rows.iter().flat_map(|r| dataset.rows.get(*r)).map(|i| *i as usize)
}

impl Micro {
    /// The micro-batch of `rows` of the dataset. Rows that it does not have are left out.
    ///
    /// Indices are 32 bits: a micro-batch holds fewer than 2^32 tokens.
    ///
    /// # Errors
    /// A file of tokens that cannot be read any more.
    pub fn collate(dataset: &Dataset, rows: &[usize]) -> Result<Self, Error> {
        let size = Size::of(dataset, rows);
        let mut out = Self {
            ids: Vec::with_capacity(size.tokens),
            positions: Vec::with_capacity(size.tokens),
            docs: Vec::new(),
            targets: Vec::with_capacity(size.targets),
        };
        for i in samples(dataset, rows) {
            let Some(example) = dataset.samples.get(i)? else { continue };
            let base = out.ids.len() as u32;
            out.ids.extend(&example.ids);
            out.positions.extend(0..example.ids.len() as u32);
            out.docs.push(example.ids.len());
            let next = example.labels.iter().skip(1).enumerate();
            let supervised = next.filter(|(_, label)| **label != UNSUPERVISED);
            out.targets.extend(supervised.map(|(i, label)| (base + i as u32, label.unsigned_abs())));
        }
        Ok(out)
    }
}
