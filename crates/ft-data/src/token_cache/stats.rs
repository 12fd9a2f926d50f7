//! Counts of rows read, used and dropped, with reasons.

use super::record::saturating_u32;
use crate::shape::notes::Notes;
use ft_base::error::Location;
use ft_recipe::OverLength;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Dropped rows to show.
const SHOWN: usize = 5;

/// Counts over a dataset.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Rows read.
    pub rows_read: usize,
    /// Samples: one for each used row, or several of a divided document.
    pub examples: usize,
    /// Dropped rows.
    pub drops: Drops,
    /// Whether dropped rows were reported as problems.
    pub reported: bool,
    /// Samples cut to `max_length`.
    pub truncated: usize,
    /// Documents divided into samples of `max_length`.
    pub divided: usize,
    /// Sample lengths in tokens, before truncation or dropping by length.
    pub whole: Counts,
    /// Tokens of an epoch.
    pub tokens: usize,
    /// Targets of an epoch, counted after the shift.
    pub targets: usize,
    /// Sample lengths of an epoch, in tokens.
    pub lengths: Lengths,
    /// Rows of an epoch, after packing.
    pub rows: usize,
    /// Filled share of the rows' `max_length` tokens; 1 without packing.
    pub fill: f64,
    /// The first few dropped rows, with place and reason.
    pub left_out: Vec<String>,
    /// Unread contents of data folders, one sentence per entry.
    pub not_read: Vec<String>,
    /// Text lost or changed in used rows, and unread keys of used rows.
    pub notes: Notes,
    /// Identities of the teachers with values in used rows, as JSON.
    pub teachers: BTreeSet<String>,
}

/// Dropped rows by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drops {
    /// Invalid for the format (`on_bad_row = "skip"`).
    pub bad: usize,
    /// No targets (`on_bad_row = "skip"`).
    pub empty_mask: usize,
    /// No targets left by `over_length = "truncate"` or `"split"`.
    pub empty_after_truncation: usize,
    /// Longer than `max_length` (`over_length = "drop"`).
    pub too_long: usize,
}

impl Drops {
    /// Sum over all reasons.
    pub fn total(&self) -> usize {
        self.bad + self.empty_mask + self.empty_after_truncation + self.too_long
    }

    /// Counts above 0 with their reasons.
    pub fn reasons(&self) -> impl Iterator<Item = (usize, &'static str)> {
        let all = [
            (self.bad, "not what the format asks for"),
            (self.empty_mask, "nothing supervised"),
            (self.empty_after_truncation, "empty mask after truncation"),
            (self.too_long, "longer than data.max_length"),
        ];
        all.into_iter().filter(|(count, _)| *count > 0)
    }

    /// A sentence about `rows` rows read; `None` if all are used.
    pub fn told(&self, rows: usize) -> Option<String> {
        let each: Vec<String> = self.reasons().map(|(count, why)| format!("{count} {why}")).collect();
        let left = match self.total() {
            0 => return None,
            1 => "1 is".into(),
            n => format!("{n} are"),
        };
        Some(format!("of {rows} rows {left} left out: {}", each.join(", ")))
    }

    /// A remedy for the most frequent reason.
    pub fn hint(&self) -> &'static str {
        if self.empty_after_truncation.max(self.too_long) > self.bad.max(self.empty_mask) {
            "raise data.max_length: ft data shows what each length loses"
        } else {
            "ft data lists the rows"
        }
    }
}

/// Distribution of sample lengths, in tokens; all 0 without samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lengths {
    /// Shortest.
    pub min: usize,
    /// 50th percentile, by nearest rank.
    pub median: usize,
    /// 95th percentile, by nearest rank.
    pub p95: usize,
    /// Longest.
    pub max: usize,
}

/// Histogram of sample lengths: length in tokens to number of samples.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts(BTreeMap<u32, u64>);

impl Counts {
    /// Adds `samples` samples of `tokens` tokens.
    pub fn add(&mut self, tokens: usize, samples: u64) {
        *self.0.entry(saturating_u32(tokens)).or_default() += samples;
    }

    /// Total number of tokens.
    pub fn tokens(&self) -> u64 {
        self.0.iter().map(|(n, samples)| u64::from(*n) * samples).sum()
    }

    /// Length of the longest sample.
    pub fn longest(&self) -> usize {
        self.0.last_key_value().map_or(0, |(n, _)| *n as usize)
    }

    /// Minimum, median, 95th percentile and maximum.
    pub fn lengths(&self) -> Lengths {
        let all: u64 = self.0.values().sum();
        // nearest rank: the smallest length with at least this share of samples at or below
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

    /// Tokens and samples affected by a length limit. `Drop` counts all tokens of a longer sample, `Split` none, other
    /// settings the tokens beyond the limit.
    pub fn over(&self, max: usize, over: OverLength) -> (usize, usize) {
        let lost = |n: usize| match over {
            OverLength::Drop => n,
            OverLength::Split => 0,
            OverLength::Truncate | OverLength::Error => n - max,
        };
        let longer = self.0.iter().map(|(n, samples)| (*n as usize, *samples as usize));
        longer
            .filter(|(n, _)| *n > max)
            .fold((0, 0), |(tokens, all), (n, samples)| (tokens + lost(n) * samples, all + samples))
    }
}

/// Counts of one source, as stored with the encoded samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SourceStats {
    pub rows_read: usize,
    pub drops: Drops,
    pub truncated: usize,
    pub divided: usize,
    pub whole: Counts,
    /// The first few dropped rows, with reason.
    pub left_out: Vec<(Location, String)>,
    pub notes: Notes,
    /// Identities of teachers, as JSON, up to a small limit.
    pub teachers: BTreeSet<String>,
}

impl SourceStats {
    /// Records a dropped row, up to a small limit.
    pub fn show(&mut self, place: &Location, why: &str) {
        if self.left_out.len() < SHOWN {
            self.left_out.push((place.clone(), why.lines().next().unwrap_or_default().to_string()));
        }
    }

    /// Records the identity of a teacher.
    pub fn add_teacher(&mut self, by: String) {
        if self.teachers.len() < SHOWN {
            self.teachers.insert(by);
        }
    }

    /// Documents truncated, divided or dropped by `max_length`. If 0, a larger limit changes nothing.
    pub fn cut(&self) -> usize {
        self.truncated + self.divided + self.drops.too_long + self.drops.empty_after_truncation
    }

    /// The count of documents longer than `max_length` that are used.
    pub fn cut_by(&mut self, over: OverLength) -> &mut usize {
        if over == OverLength::Split { &mut self.divided } else { &mut self.truncated }
    }

    /// All recorded places, for updating file names.
    pub fn places(&mut self) -> impl Iterator<Item = &mut Location> {
        self.left_out.iter_mut().map(|(place, _)| place).chain(self.notes.places())
    }
}

impl Stats {
    /// Adds the counts of the next source.
    pub(crate) fn add(&mut self, found: &SourceStats) {
        self.rows_read += found.rows_read;
        self.truncated += found.truncated;
        self.divided += found.divided;
        let (d, more) = (&mut self.drops, &found.drops);
        d.bad += more.bad;
        d.empty_mask += more.empty_mask;
        d.empty_after_truncation += more.empty_after_truncation;
        d.too_long += more.too_long;
        found.whole.0.iter().for_each(|(n, samples)| self.whole.add(*n as usize, *samples));
        let room = SHOWN.saturating_sub(self.left_out.len());
        self.left_out.extend(found.left_out.iter().take(room).map(|(place, why)| format!("{place}: {why}")));
        self.notes.extend(&found.notes);
        self.teachers.extend(found.teachers.iter().cloned());
    }
}
