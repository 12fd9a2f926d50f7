//! Values with a syntax of their own: sets of layers and experts, tokens, recomputation.

use crate::syntax::quote;

/// An entry of `train.tokens`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Token {
    /// Text, as spelled by the tokenizer.
    Text(String),
    /// Token id.
    Id(u32),
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Token::Text(text) => f.write_str(&quote(text)),
            Token::Id(id) => write!(f, "{id}"),
        }
    }
}

/// `train.layers`, except "all".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerSet {
    /// `"0-5"` (inclusive), `"24-"` (from 24 on), or a list of indices.
    Indices(IndexSet),
    /// `"-6:"`: the last six.
    Last(usize),
}

/// A set of indices, in the form written by the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IndexSet {
    /// Inclusive range; without an upper bound if `None`.
    Range(usize, Option<usize>),
    /// Explicit indices.
    List(Vec<usize>),
}

impl Default for IndexSet {
    /// The empty set.
    fn default() -> Self {
        IndexSet::List(Vec::new())
    }
}

impl IndexSet {
    /// Whether the set contains `i`.
    pub fn contains(&self, i: usize) -> bool {
        match self {
            IndexSet::Range(a, b) => i >= *a && b.is_none_or(|b| i <= b),
            IndexSet::List(v) => v.contains(&i),
        }
    }
}

impl LayerSet {
    /// Whether the set contains layer `i` of `count`.
    pub fn contains(&self, i: usize, count: usize) -> bool {
        match self {
            LayerSet::Indices(s) => s.contains(i),
            LayerSet::Last(n) => i + n >= count,
        }
    }
}

/// `memory.recompute`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// The fastest option within the memory budget.
    #[default]
    Auto,
    /// All layers.
    All,
    /// Feed-forward modules and norms of all layers.
    FeedForward,
    /// The norms of all layers.
    Norms,
    /// Nothing.
    None,
    /// This many layers, from the bottom.
    Layers(usize),
}

impl Recompute {
    /// The words of `memory.recompute`, with values.
    pub(crate) const WORDS: [(&str, Recompute); 5] = [
        ("auto", Recompute::Auto),
        ("all", Recompute::All),
        ("feed_forward", Recompute::FeedForward),
        ("norms", Recompute::Norms),
        ("none", Recompute::None),
    ];
}
