//! What enters the model.

use super::encode::{Example, UNSUPERVISED};
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
    ///
    /// # Errors
    /// A file of tokens or rows that cannot be read any more.
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
    /// The micro-batch of `rows` of the dataset. Rows that it does not have are left out.
    ///
    /// Indices are 32 bits: a micro-batch holds fewer than 2^32 tokens.
    ///
    /// # Errors
    /// A file of tokens that cannot be read any more.
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
        let supervised = next.filter(|(_, label)| **label != UNSUPERVISED);
        self.targets.extend(supervised.map(|(i, label)| (base + i as u32, label.unsigned_abs())));
    }
}
