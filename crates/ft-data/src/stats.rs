//! What was read, what was left out and why.

use super::{Notes, Rows};
use ft_base::error::Place;
use ft_recipe::OverLength;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Rows that are left out and shown.
const SHOWN: usize = 5;

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
    /// Tokens of the samples before any was cut or left out for its length.
    pub whole: Counts,
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
    /// What folders have that is not read, a sentence each.
    pub not_read: Vec<String>,
    /// What the texts of used rows lost or changed, or what of these rows is not read.
    pub notes: Notes,
}

/// Rows that were left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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

/// How many samples have each length, in tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts(BTreeMap<u32, u64>);

impl Counts {
    /// Counts samples of this length.
    pub fn add(&mut self, tokens: usize, samples: u64) {
        *self.0.entry(super::record::small(tokens)).or_default() += samples;
    }

    /// Tokens of all.
    pub fn tokens(&self) -> u64 {
        self.0.iter().map(|(n, samples)| u64::from(*n) * samples).sum()
    }

    /// Tokens of the longest.
    pub fn longest(&self) -> usize {
        self.0.last_key_value().map_or(0, |(n, _)| *n as usize)
    }

    /// Their distribution.
    pub fn lengths(&self) -> Lengths {
        let all: u64 = self.0.values().sum();
        // nearest rank: the smallest value that the share does not exceed
        let rank = |percent: u64| {
            let (rank, mut below) = ((all * percent).div_ceil(100), 0);
            let found = self.0.iter().find(|(_, samples)| {
                below += **samples;
                below >= rank
            });
            found.map_or(0, |(n, _)| *n as usize)
        };
        let min = self.0.first_key_value().map_or(0, |(n, _)| *n as usize);
        Lengths { min, median: rank(50), p95: rank(95), max: self.longest() }
    }

    /// What a limit takes: tokens, and the samples that they are of. Dropped samples go whole; of others, it is what lies
    /// beyond the limit.
    pub fn over(&self, max: usize, over: OverLength) -> (usize, usize) {
        let kept = if over == OverLength::Drop { 0 } else { max };
        let longer = self.0.iter().map(|(n, samples)| (*n as usize, *samples as usize));
        longer
            .filter(|(n, _)| *n > max)
            .fold((0, 0), |(tokens, all), (n, samples)| (tokens + (n - kept) * samples, all + samples))
    }
}

impl FromIterator<usize> for Counts {
    fn from_iter<T: IntoIterator<Item = usize>>(lengths: T) -> Self {
        let mut out = Self::default();
        lengths.into_iter().for_each(|n| out.add(n, 1));
        out
    }
}

/// What was found in a source beside its samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Found {
    pub rows_read: usize,
    pub drops: Drops,
    pub truncated: usize,
    pub whole: Counts,
    /// The first few rows that were left out, and why.
    pub left_out: Vec<(Place, String)>,
    pub notes: Notes,
}

impl Found {
    /// Shows a row that is left out, where few were so far.
    pub fn show(&mut self, place: &Place, why: &str) {
        if self.left_out.len() < SHOWN {
            self.left_out.push((place.clone(), why.lines().next().unwrap_or_default().to_string()));
        }
    }

    /// Samples that `max_length` cut or left out: with none, a larger one changes nothing.
    pub fn cut(&self) -> usize {
        self.truncated + self.drops.too_long + self.drops.empty_after_truncation
    }

    /// The places that are told.
    pub fn places(&mut self) -> impl Iterator<Item = &mut Place> {
        self.left_out.iter_mut().map(|(place, _)| place).chain(self.notes.places())
    }
}

impl Stats {
    /// Adds what was found in the next source.
    pub(super) fn add(&mut self, found: &Found) {
        self.rows_read += found.rows_read;
        self.truncated += found.truncated;
        let (d, more) = (&mut self.drops, &found.drops);
        d.bad += more.bad;
        d.empty_mask += more.empty_mask;
        d.empty_after_truncation += more.empty_after_truncation;
        d.too_long += more.too_long;
        found.whole.0.iter().for_each(|(n, samples)| self.whole.add(*n as usize, *samples));
        let room = SHOWN.saturating_sub(self.left_out.len());
        self.left_out.extend(found.left_out.iter().take(room).map(|(place, why)| format!("{place}: {why}")));
        self.notes.extend(&found.notes);
    }

    /// Fills in what the rows of an epoch decide.
    pub(super) fn count(&mut self, samples: usize, rows: &Rows, lengths: &Counts, max: usize, pack: bool) {
        self.examples = samples;
        self.rows = rows.len();
        self.tokens = rows.tokens as usize;
        self.targets = rows.targets as usize;
        self.lengths = lengths.lengths();
        let room = rows.len() as f64 * max as f64;
        self.fill = if pack && room > 0.0 { self.tokens as f64 / room } else { 1.0 };
    }
}
