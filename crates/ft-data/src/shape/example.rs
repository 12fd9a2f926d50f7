//! Tokenized samples.

/// Label of an unsupervised token.
pub const IGNORE_INDEX: i32 = -100;

/// A tokenized sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// Token ids, at least one.
    pub ids: Vec<u32>,
    /// One label per id, not shifted: the id if supervised, else [`IGNORE_INDEX`].
    pub labels: Vec<i32>,
    /// Index of the source in the recipe.
    pub source: usize,
    /// Line in the data file.
    pub line: usize,
}

impl Example {
    /// Number of targets: supervised tokens except the first of the sample.
    pub fn targets(&self) -> usize {
        self.labels.iter().skip(1).filter(|l| **l != IGNORE_INDEX).count()
    }
}
