//! Tokenized samples.

use std::ops::Range;

/// Label of an unsupervised token.
pub const IGNORE_INDEX: i32 = -100;

/// Contents of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Content {
    /// One document.
    #[default]
    Document,
    /// Two documents end to end: chosen, with this number of tokens, and rejected.
    Pair(usize),
    /// A prompt with a completion, and whether the completion is desirable.
    Rated(bool),
}

/// Kept values of a teacher at the targets of a sample or micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Teacher {
    /// Values for each target; 0 without a teacher.
    pub kept: usize,
    /// Token ids, target by target.
    pub ids: Vec<u32>,
    /// Unnormalized log-probabilities; negative infinity in empty places.
    pub logits: Vec<f32>,
}

impl Teacher {
    /// Largest number of values for a target.
    pub const MOST_KEPT: usize = 512;

    /// Appends the values at `targets` targets to those of the `before` earlier ones. All targets get the larger
    /// `kept` of both; missing places hold id 0 and negative infinity.
    pub(crate) fn extend(&mut self, before: usize, targets: usize, of: &Teacher) {
        if of.kept > self.kept {
            let old = std::mem::replace(self, Self { kept: of.kept, ..Self::default() });
            self.append(before, &old);
        }
        self.append(targets, of);
    }

    /// Appends the values of `targets` more targets, at most `kept` for each.
    pub(super) fn append(&mut self, targets: usize, of: &Teacher) {
        let empty = self.kept.saturating_sub(of.kept);
        for target in 0..if self.kept > 0 { targets } else { 0 } {
            let places = target * of.kept..(target + 1) * of.kept;
            self.ids.extend(&of.ids[places.clone()]);
            self.logits.extend(&of.logits[places]);
            self.ids.extend(std::iter::repeat_n(0, empty));
            self.logits.extend(std::iter::repeat_n(f32::NEG_INFINITY, empty));
        }
    }
}

/// A tokenized sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Example {
    /// Token ids, at least one.
    pub ids: Vec<u32>,
    /// One label per id, not shifted: the id if supervised, else [`IGNORE_INDEX`].
    pub labels: Vec<i32>,
    /// One weight per label; empty for weights of 1.
    pub weights: Vec<f32>,
    /// Values of a teacher for each target.
    pub teacher: Teacher,
    pub content: Content,
    /// Whether the targets are the last tokens of the documents, as a score head reads them, with labels of their own:
    /// classes.
    pub scored: bool,
    /// Index of the source in the recipe.
    pub source: usize,
    /// Line in the data file.
    pub line: usize,
}

impl Example {
    /// Tokens of the documents, in order.
    pub fn documents(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let n = self.ids.len();
        let (first, second) = match self.content {
            Content::Pair(chosen) => (0..chosen.min(n), Some(chosen.min(n)..n)),
            _ => (0..n, None),
        };
        std::iter::once(first).chain(second)
    }

    /// Tokens with a supervised token behind them in the same document; of scored documents, the last tokens.
    pub fn queries(&self) -> impl Iterator<Item = usize> + '_ {
        let supervised = |i: &usize| self.labels.get(self.label_of(*i)).is_some_and(|l| *l != IGNORE_INDEX);
        let of = |d: Range<usize>| {
            let last = d.end.saturating_sub(1);
            if self.scored { last..d.end } else { d.start..last }
        };
        self.documents().flat_map(of).filter(supervised)
    }

    /// Index of the label of a query.
    pub fn label_of(&self, query: usize) -> usize {
        query + usize::from(!self.scored)
    }

    /// Number of targets: supervised tokens except the first of a document; scored documents.
    pub fn targets(&self) -> usize {
        self.queries().count()
    }

    /// Sum of the weights of the targets.
    pub fn weight(&self) -> f64 {
        let of = |i: usize| self.weights.get(self.label_of(i)).map_or(1.0, |w| f64::from(*w));
        self.queries().map(of).sum()
    }

    /// Tokens before the first supervised one.
    pub fn prompt(&self) -> usize {
        self.labels.iter().take_while(|l| **l == IGNORE_INDEX).count()
    }
}
