//! Rows of an epoch, as lists of samples.

use super::mix::{Mixture, MixtureReader};
use crate::error::Error;
use crate::keep::bytes::{List, Scratch, Spool, Window};
use crate::keep::record::{Item, saturating_u32};
use crate::keep::samples::{Reader, Samples};
use std::ops::Range;

/// Rows as lists of samples; on disk if long.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    kind: Kind,
    /// Total tokens.
    pub tokens: u64,
    /// Total targets.
    pub targets: u64,
    /// Length of the longest sample, in tokens.
    pub longest: u32,
}

#[derive(Clone, Debug)]
enum Kind {
    /// One sample per row.
    Single(Mixture),
    /// Sample numbers, and two values per row: end offset into the sample numbers, and token count.
    Packed(List, List),
}

impl Default for Kind {
    fn default() -> Self {
        Kind::Single(Mixture::default())
    }
}

impl Rows {
    /// Builds rows from lists of sample numbers.
    ///
    /// # Errors
    /// None in practice, for samples in memory.
    pub(crate) fn of(rows: &[Vec<usize>], samples: &Samples) -> Result<Self, Error> {
        let (mut reader, mut writer) = (samples.reader(), RowsWriter::packed(&Scratch::default()));
        for row in rows {
            let items: Result<Vec<Item>, Error> = row.iter().map(|i| reader.item(*i)).collect();
            writer.row(&items?)?;
        }
        writer.finish(Mixture::default())
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        match &self.kind {
            Kind::Single(mix) => mix.len(),
            Kind::Packed(_, ends) => ends.len() / 2,
        }
    }

    /// Whether the epoch has no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The samples of row `i`; empty if out of range.
    ///
    /// # Errors
    /// A row file that can no longer be read.
    pub fn get(&self, i: usize) -> Result<Vec<u32>, Error> {
        if i >= self.len() {
            return Ok(Vec::new());
        }
        match &self.kind {
            Kind::Single(mix) => Ok(vec![mix.reader().at(i)?]),
            Kind::Packed(samples, ends) => samples.range(range(&mut Window::default(), ends, i)?.0),
        }
    }

    /// Returns a reader of rows with sample lengths.
    pub fn reader<'a>(&'a self, samples: &'a Samples) -> RowsReader<'a> {
        let from = match &self.kind {
            Kind::Single(mix) => Lists::Single(mix.reader()),
            Kind::Packed(samples, ends) => Lists::Packed(samples, ends, Default::default()),
        };
        RowsReader { count: self.len(), from, samples: samples.reader() }
    }

    /// Memory in use, in bytes.
    pub fn resident(&self) -> u64 {
        match &self.kind {
            Kind::Single(mix) => mix.resident(),
            Kind::Packed(samples, ends) => samples.resident() + ends.resident(),
        }
    }
}

/// The sample range and token count of row `i`.
fn range(window: &mut Window, ends: &List, i: usize) -> Result<(Range<usize>, u32), Error> {
    let start = match i.checked_sub(1) {
        Some(before) => ends.at(window, 2 * before)?,
        None => 0,
    };
    let (end, tokens) = (ends.at(window, 2 * i)?, ends.at(window, 2 * i + 1)?);
    Ok((start as usize..end as usize, tokens))
}

/// Reads rows, sequential ones in batches.
pub struct RowsReader<'a> {
    count: usize,
    from: Lists<'a>,
    samples: Reader<'a>,
}

enum Lists<'a> {
    Single(MixtureReader<'a>),
    Packed(&'a List, &'a List, (Window, Window)),
}

impl RowsReader<'_> {
    /// The samples of row `i`; empty if out of range.
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

/// Rows under construction.
#[derive(Default)]
pub(crate) struct RowsWriter {
    rows: Rows,
    /// Sample numbers and row ends, if packed.
    lists: Option<(Spool, Spool)>,
    end: usize,
}

impl RowsWriter {
    /// Writer for rows with several samples.
    pub fn packed(scratch: &Scratch) -> Self {
        Self { lists: Some((scratch.list(), scratch.list())), ..Self::default() }
    }

    /// Appends a row.
    ///
    /// # Errors
    /// A list that can no longer be read.
    pub fn row(&mut self, items: &[Item]) -> Result<(), Error> {
        let tokens: u64 = items.iter().map(|i| u64::from(i.tokens)).sum();
        self.rows.tokens += tokens;
        self.rows.targets += items.iter().map(|i| u64::from(i.targets)).sum::<u64>();
        self.rows.longest = items.iter().map(|i| i.tokens).fold(self.rows.longest, u32::max);
        if let Some((samples, ends)) = &mut self.lists {
            self.end += items.len();
            items.iter().try_for_each(|i| samples.push(i.sample))?;
            ends.push(saturating_u32(self.end))?;
            ends.push(u32::try_from(tokens).unwrap_or(u32::MAX))?;
        }
        Ok(())
    }

    /// Finishes the rows; without packing, the rows are the samples of `mix`.
    ///
    /// # Errors
    /// As [`RowsWriter::row`].
    pub fn finish(self, mix: Mixture) -> Result<Rows, Error> {
        let kind = match self.lists {
            None => Kind::Single(mix),
            Some((samples, ends)) => Kind::Packed(samples.finish()?, ends.finish()?),
        };
        Ok(Rows { kind, ..self.rows })
    }
}
