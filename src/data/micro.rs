//! What enters the model.

use super::Dataset;
use super::encode::UNSUPERVISED;

/// One micro-batch without padding: all documents of its rows end to end.
///
/// Documents never see each other: positions begin again at each, and token `i` attends to tokens
/// `lo[i]..=i` alone. So a row with one document and a packed row are the same to the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Micro {
    /// Token ids.
    pub ids: Vec<u32>,
    /// For each token its position inside its document, from 0.
    pub positions: Vec<u32>,
    /// For each token the index, in this micro-batch, of the first token of its document.
    pub lo: Vec<u32>,
    /// Lengths of the documents, in order; their sum is the number of tokens.
    pub docs: Vec<usize>,
    /// What the loss asks for: the index of a token, and the id that is to follow it. The shift of labels is here
    /// and nowhere else, and never reaches from one document into the next.
    pub targets: Vec<(u32, u32)>,
}

impl Micro {
    /// The micro-batch of `rows` of the dataset. Rows that it does not have are left out.
    ///
    /// Indices are 32 bits: a micro-batch holds fewer than 2^32 tokens.
    pub fn collate(dataset: &Dataset, rows: &[usize]) -> Self {
        let mut out = Self::default();
        for &example in rows.iter().filter_map(|r| dataset.rows.get(*r)).flatten() {
            let Some(example) = dataset.examples.get(example) else { continue };
            let base = out.ids.len() as u32;
            out.ids.extend(&example.ids);
            out.positions.extend(0..example.ids.len() as u32);
            out.lo.extend(std::iter::repeat_n(base, example.ids.len()));
            out.docs.push(example.ids.len());
            let next = example.labels.iter().skip(1).enumerate();
            let supervised = next.filter(|(_, label)| **label != UNSUPERVISED);
            out.targets.extend(supervised.map(|(i, label)| (base + i as u32, label.unsigned_abs())));
        }
        out
    }
}
