//! Size of a micro-batch.

use ft_engine::model::Batch;
use ft_engine::model::batch::Targets;
use ft_engine::model::context_parallel::ContextParallel;
use ft_kernels::attention::Sizes as Attended;

/// Size of a micro-batch, as far as memory depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    pub tokens: u64,
    /// Supervised targets.
    pub targets: u64,
    /// Whether targets have weights.
    pub weighted: bool,
    /// Kept values of a teacher per target, in distillation.
    pub kept: u64,
    /// Tokens of the longest document.
    pub longest: u64,
    /// Most keys visible to a block of queries.
    pub reach: u64,
}

impl Tokens {
    /// For concatenated documents with `targets` targets.
    pub fn of(docs: &[usize], targets: usize) -> Self {
        let Attended { keys, longest, reach } = Attended::of_last(docs, 0);
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

    /// Documents of a micro-batch of this size: all as long as the longest, but the last.
    fn docs(self) -> Vec<usize> {
        let Attended { keys, longest, .. } = self.attended();
        let whole = keys / longest.max(1);
        let rest = keys - whole * longest;
        std::iter::repeat_n(longest, whole).chain((rest > 0).then_some(rest)).collect()
    }

    /// The part of the rank with the most tokens among `ranks` ranks of a tensor group.
    pub fn cut(self, ranks: usize) -> Self {
        let tokens = self.tokens.div_ceil(ranks as u64).max(1);
        Self { tokens, targets: self.targets.min(tokens), ..self }
    }

    /// Device bytes of the context of a whole micro-batch on a rank with the tokens `own`. On the CPU also of the whole
    /// micro-batch on the host, and of the indices of the rank's tokens and targets in it.
    pub fn beside(self, own: Self, ropes: &[usize], cuda: bool) -> u64 {
        let context = Batch::bytes(self.attended(), Targets::default(), ropes, cuda) - 12 * self.tokens;
        let host = 8 * self.tokens + 12 * self.targets + 8 * own.tokens + 4 * own.targets;
        context + if cuda { 0 } else { host }
    }

    /// The part of the rank with the most tokens among `ranks` ranks of a context group, with its segments.
    pub fn split(self, ranks: usize) -> (Self, ContextParallel<'static>) {
        let docs = self.docs();
        let segments = ft_data::segments(&docs, ranks);
        let all = (0..ranks).map(|rank| ContextParallel::planned(&docs, segments.clone(), rank));
        let length = |a: &ContextParallel<'_>| a.own().iter().map(|r| r.len()).sum::<usize>();
        // The first of several.
        let most = all.rev().max_by_key(|a| (length(a), a.keys(None)));
        let context_parallel = most.unwrap_or_else(|| ContextParallel::planned(&docs, segments, 0));
        let tokens = length(&context_parallel) as u64;
        (Self { tokens, targets: self.targets.min(tokens), ..self }, context_parallel)
    }
}
