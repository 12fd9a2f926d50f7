//! Size of a micro-batch.

use ft_engine::model::batch::Targets;
use ft_kernels::attention::Sizes as Attended;

/// Size of a micro-batch, as far as memory depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    pub tokens: u64,
    /// Supervised targets.
    pub targets: u64,
    /// Whether targets have weights.
    pub weighted: bool,
    /// Kept values of a teacher for each target, in distillation.
    pub kept: u64,
    /// Tokens of the longest document.
    pub longest: u64,
    /// Most keys visible to a block of queries.
    pub reach: u64,
}

impl Tokens {
    /// For concatenated documents with `targets` targets.
    pub fn of(docs: &[usize], targets: usize) -> Self {
        let Attended { keys, longest, reach } = Attended::of(docs);
        let (tokens, targets) = (keys as u64, targets as u64);
        Self { tokens, targets, weighted: false, kept: 0, longest: longest as u64, reach: reach as u64 }
    }

    /// Sizes of the targets.
    pub fn of_targets(self) -> Targets {
        let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Targets { count: size(self.targets), weighted: self.weighted, kept: size(self.kept) }
    }

    /// Sizes as attention takes them.
    pub fn attended(self) -> Attended {
        let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Attended { keys: size(self.tokens), longest: size(self.longest), reach: size(self.reach) }
    }

    /// Elementwise maximum.
    pub fn max(self, o: Self) -> Self {
        Self {
            tokens: self.tokens.max(o.tokens),
            targets: self.targets.max(o.targets),
            weighted: self.weighted || o.weighted,
            kept: self.kept.max(o.kept),
            longest: self.longest.max(o.longest),
            reach: self.reach.max(o.reach),
        }
    }

    /// A context-parallel rank's part.
    pub fn split(self, ranks: u64) -> Self {
        let part = |n: u64| n.div_ceil(ranks.max(1));
        Self { tokens: part(self.tokens), targets: part(self.targets), ..self }
    }
}
