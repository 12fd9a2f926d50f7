//! What was read, what was left out and why.

use super::{Example, Notes};

/// Counts over a dataset.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Rows that the files hold.
    pub rows_read: usize,
    /// Rows that became examples.
    pub examples: usize,
    /// Rows that did not, by reason.
    pub drops: Drops,
    /// Examples that were cut to `max_length`.
    pub truncated: usize,
    /// Tokens of each sample before any was cut or left out for its length, in no order.
    pub whole: Vec<u32>,
    /// Tokens of an epoch.
    pub tokens: usize,
    /// Supervised target tokens of an epoch, counted after the shift.
    pub targets: usize,
    /// Lengths of the examples of an epoch, in tokens.
    pub lengths: Lengths,
    /// Rows of an epoch, after packing.
    pub rows: usize,
    /// Share of the rows' `max_length` tokens that hold one; 1 when rows are not packed.
    pub fill: f64,
    /// The first few rows that were left out: their place and why.
    pub left_out: Vec<String>,
    /// What the texts of used rows lost or changed, or what of these rows is not read.
    pub notes: Notes,
}

/// Rows that were left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    /// Not what their format asks for (`on_bad_row = "skip"`).
    pub bad: usize,
    /// Nothing supervised (`on_bad_row = "skip"`).
    pub empty_mask: usize,
    /// Nothing supervised in what `over_length = "truncate"` left.
    pub empty_after_truncation: usize,
    /// Longer than `max_length` (`over_length = "drop"`).
    pub too_long: usize,
}

impl Drops {
    /// All of them.
    pub fn total(&self) -> usize {
        self.bad + self.empty_mask + self.empty_after_truncation + self.too_long
    }
}

/// How long examples are, in tokens; all 0 when there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lengths {
    /// The shortest.
    pub min: usize,
    /// At least half are no longer than this.
    pub median: usize,
    /// At least 95 % are no longer than this.
    pub p95: usize,
    /// The longest.
    pub max: usize,
}

impl Lengths {
    /// Of a list of lengths.
    pub fn of(mut lengths: Vec<usize>) -> Self {
        lengths.sort_unstable();
        // nearest rank: the smallest value that the share does not exceed
        let rank = |percent: usize| match (lengths.len() * percent).div_ceil(100) {
            0 => 0,
            r => lengths[r - 1],
        };
        Self {
            min: lengths.first().copied().unwrap_or(0),
            median: rank(50),
            p95: rank(95),
            max: lengths.last().copied().unwrap_or(0),
        }
    }
}

impl Stats {
    /// What another `data.max_length` would cut: tokens, and samples.
    pub fn cut_at(&self, max: usize) -> (usize, usize) {
        let over = self.whole.iter().map(|n| (*n as usize).saturating_sub(max)).filter(|n| *n > 0);
        over.fold((0, 0), |(tokens, samples), n| (tokens + n, samples + 1))
    }

    /// Fills in what the rows of an epoch decide.
    pub(super) fn count(&mut self, examples: &[Example], rows: &[Vec<usize>], max: usize, pack: bool) {
        let each = || rows.iter().flatten().map(|i| &examples[*i]);
        self.examples = examples.len();
        self.rows = rows.len();
        self.tokens = each().map(|e| e.ids.len()).sum();
        self.targets = each().map(Example::targets).sum();
        self.lengths = Lengths::of(each().map(|e| e.ids.len()).collect());
        let room = rows.len() as f64 * max as f64;
        self.fill = if pack && room > 0.0 { self.tokens as f64 / room } else { 1.0 };
    }
}
