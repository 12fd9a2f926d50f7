//! Units of the walk that a rank holds.

use std::ops::Range;

/// Consecutive units of the walk: 0 is the embedding, then the layers, then the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Units {
    /// First unit.
    pub first: usize,
    /// One past the last unit.
    pub end: usize,
    /// Number of layers of the model.
    pub layers: usize,
}

impl Units {
    /// All units of a model with so many layers.
    pub fn all(layers: usize) -> Self {
        Self { first: 0, end: layers + 2, layers }
    }

    /// Whether a unit is one of these.
    pub fn has(self, unit: usize) -> bool {
        (self.first..self.end).contains(&unit)
    }

    /// Whether the embedding is one of these.
    pub fn has_embedding(self) -> bool {
        self.first == 0
    }

    /// Whether the head is one of these.
    pub fn has_head(self) -> bool {
        self.end == self.layers + 2
    }

    /// Numbers of the layers among these, from 0.
    pub fn own_layers(self) -> Range<usize> {
        self.first.max(1) - 1..self.end.min(self.layers + 1).max(1) - 1
    }
}
