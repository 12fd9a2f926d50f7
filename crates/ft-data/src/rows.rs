//! Rows of an epoch: which samples each holds.

use super::bytes::{List, Scratch, Spool, Window};
use super::error::Error;
use super::mix::{Mix, MixReader};
use super::record::small;
use super::samples::{Reader, Samples};
use std::ops::Range;

/// A sample of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Item {
    /// Its number.
    pub sample: u32,
    /// Tokens.
    pub tokens: u32,
    /// Supervised targets.
    pub targets: u32,
}

/// Rows as lists of samples, on disk where they are many.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    kind: Kind,
    /// Tokens of all.
    pub tokens: u64,
    /// Supervised targets of all.
    pub targets: u64,
    /// Tokens of the longest sample.
    pub longest: u32,
}

#[derive(Clone, Debug)]
enum Kind {
    /// One sample each.
    Single(Mix),
    /// Samples, and two numbers a row: where it ends among them, and its tokens.
    Packed(List, List),
}

impl Default for Kind {
    fn default() -> Self {
        Kind::Single(Mix::default())
    }
}

impl Rows {
    /// Of lists of samples.
    ///
    /// # Errors
    /// None, of samples in memory.
    pub(super) fn of(rows: &[Vec<usize>], samples: &Samples) -> Result<Self, Error> {
        let (mut reader, mut writer) = (samples.reader(), RowsWriter::packed(&Scratch::default()));
        for row in rows {
            let items: Result<Vec<Item>, Error> = row.iter().map(|i| reader.item(*i)).collect();
            writer.row(&items?)?;
        }
        writer.finish(Mix::default())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match &self.kind {
            Kind::Single(mix) => mix.len(),
            Kind::Packed(_, ends) => ends.len() / 2,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The samples of row `i`; none where it is not there.
    ///
    /// # Errors
    /// A file of rows that cannot be read any more.
    pub fn get(&self, i: usize) -> Result<Vec<u32>, Error> {
        if i >= self.len() {
            return Ok(Vec::new());
        }
        match &self.kind {
            Kind::Single(mix) => Ok(vec![mix.reader().at(i)?]),
            Kind::Packed(samples, ends) => samples.range(range(&mut Window::default(), ends, i)?.0),
        }
    }

    /// Reads rows with the lengths of their samples.
    pub fn reader<'a>(&'a self, samples: &'a Samples) -> RowsReader<'a> {
        let from = match &self.kind {
            Kind::Single(mix) => Lists::Single(mix.reader()),
            Kind::Packed(samples, ends) => Lists::Packed(samples, ends, Default::default()),
        };
        RowsReader { count: self.len(), from, samples: samples.reader() }
    }

    /// Bytes that they take in memory.
    pub fn resident(&self) -> u64 {
        match &self.kind {
            Kind::Single(mix) => mix.resident(),
            Kind::Packed(samples, ends) => samples.resident() + ends.resident(),
        }
    }
}

/// The place of row `i` among the samples, and its tokens.
fn range(window: &mut Window, ends: &List, i: usize) -> Result<(Range<usize>, u32), Error> {
    let start = match i.checked_sub(1) {
        Some(before) => ends.at(window, 2 * before)?,
        None => 0,
    };
    let (end, tokens) = (ends.at(window, 2 * i)?, ends.at(window, 2 * i + 1)?);
    Ok((start as usize..end as usize, tokens))
}

/// Reads rows, those that follow one another a part at a time.
pub struct RowsReader<'a> {
    count: usize,
    from: Lists<'a>,
    samples: Reader<'a>,
}

enum Lists<'a> {
    Single(MixReader<'a>),
    Packed(&'a List, &'a List, (Window, Window)),
}

impl RowsReader<'_> {
    /// The samples of row `i`; none where it is not there.
    ///
    /// # Errors
    /// As [`Rows::get`].
    pub fn items(&mut self, i: usize) -> Result<Vec<Item>, Error> {
        if i >= self.count {
            return Ok(Vec::new());
        }
        match &mut self.from {
            Lists::Single(mix) => Ok(vec![self.samples.item(mix.at(i)? as usize)?]),
            Lists::Packed(samples, ends, (window, of_ends)) => {
                let places = range(of_ends, ends, i)?.0;
                places.map(|at| self.samples.item(samples.at(window, at)? as usize)).collect()
            }
        }
    }

    /// Tokens of row `i`.
    ///
    /// # Errors
    /// As [`Rows::get`].
    pub fn tokens(&mut self, i: usize) -> Result<u64, Error> {
        match &mut self.from {
            Lists::Packed(_, ends, (_, of_ends)) if i < self.count => {
                Ok(u64::from(range(of_ends, ends, i)?.1))
            }
            _ => Ok(self.items(i)?.iter().map(|item| u64::from(item.tokens)).sum()),
        }
    }
}

/// Rows that are being made.
#[derive(Default)]
pub(super) struct RowsWriter {
    rows: Rows,
    /// Of packed rows, samples and where they end.
    lists: Option<(Spool, Spool)>,
    end: usize,
}

impl RowsWriter {
    /// Of rows that hold several samples.
    pub fn packed(scratch: &Scratch) -> Self {
        Self { lists: Some((scratch.list(), scratch.list())), ..Self::default() }
    }

    /// Appends a row.
    ///
    /// # Errors
    /// A list that cannot be read any more.
    pub fn row(&mut self, items: &[Item]) -> Result<(), Error> {
        let tokens: u64 = items.iter().map(|i| u64::from(i.tokens)).sum();
        self.rows.tokens += tokens;
        self.rows.targets += items.iter().map(|i| u64::from(i.targets)).sum::<u64>();
        self.rows.longest = items.iter().map(|i| i.tokens).fold(self.rows.longest, u32::max);
        if let Some((samples, ends)) = &mut self.lists {
            self.end += items.len();
            items.iter().try_for_each(|i| samples.push(i.sample))?;
            ends.push(small(self.end))?;
            ends.push(u32::try_from(tokens).unwrap_or(u32::MAX))?;
        }
        Ok(())
    }

    /// The rows; those that hold one sample each, of `mix`.
    ///
    /// # Errors
    /// As [`RowsWriter::row`].
    pub fn finish(self, mix: Mix) -> Result<Rows, Error> {
        let kind = match self.lists {
            None => Kind::Single(mix),
            Some((samples, ends)) => Kind::Packed(samples.finish()?, ends.finish()?),
        };
        Ok(Rows { kind, ..self.rows })
    }
}
