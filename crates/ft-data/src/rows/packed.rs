//! Rows of an epoch, as lists of samples.

use super::mix::{Mixture, MixtureReader};
use crate::error::Error;
use crate::token_cache::{
    bytes::{List, Scratch, Spool, Window},
    record::{Item, saturating_u32},
    samples::{Reader, Samples},
};
use std::ops::Range;

/// Rows as lists of samples; on disk if long.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    /// Without packing, one sample per row.
    single: Mixture,
    packed: Option<Lists>,
    /// Total tokens.
    pub tokens: u64,
    /// Total targets.
    pub targets: u64,
    /// Length of the longest document, in tokens.
    pub longest: u32,
    /// Whether a sample has weights.
    pub weighted: bool,
    /// Whether a sample has values of a teacher.
    pub has_teacher: bool,
}

/// Rows with several samples.
#[derive(Clone, Debug)]
struct Lists {
    /// Sample numbers.
    samples: List,
    /// Two values per row: end offset into the sample numbers, and token count.
    ends: List,
}

impl Lists {
    /// The sample range and token count of row `i`.
    fn range(&self, window: &mut Window, i: usize) -> Result<(Range<usize>, u32), Error> {
        let start = match i.checked_sub(1) {
            Some(before) => self.ends.at(window, 2 * before)?,
            None => 0,
        };
        let (end, tokens) = (self.ends.at(window, 2 * i)?, self.ends.at(window, 2 * i + 1)?);
        Ok((start as usize..end as usize, tokens))
    }
}

impl Rows {
    /// Builds rows from lists of sample numbers.
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
        self.packed.as_ref().map_or(self.single.len(), |lists| lists.ends.len() / 2)
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
        match &self.packed {
            None => Ok(vec![self.single.reader().at(i)?]),
            Some(lists) => lists.samples.range(lists.range(&mut Window::default(), i)?.0),
        }
    }

    /// Returns a reader of rows with sample lengths.
    pub fn reader<'a>(&'a self, samples: &'a Samples) -> RowsReader<'a> {
        RowsReader {
            rows: self,
            single: self.single.reader(),
            windows: Default::default(),
            samples: samples.reader(),
        }
    }

    /// Memory in use, in bytes.
    pub fn resident(&self) -> u64 {
        let packed = self.packed.as_ref().map_or(0, |l| l.samples.resident() + l.ends.resident());
        self.single.resident() + packed
    }
}

/// Reads rows, sequential ones in batches.
pub struct RowsReader<'a> {
    rows: &'a Rows,
    single: MixtureReader<'a>,
    /// Read-ahead of the sample numbers and of the row ends.
    windows: (Window, Window),
    samples: Reader<'a>,
}

impl RowsReader<'_> {
    /// The samples of row `i`; empty if out of range.
    ///
    /// # Errors
    /// As [`Rows::get`].
    pub fn items(&mut self, i: usize) -> Result<Vec<Item>, Error> {
        if i >= self.rows.len() {
            return Ok(Vec::new());
        }
        match &self.rows.packed {
            None => Ok(vec![self.samples.item(self.single.at(i)? as usize)?]),
            Some(lists) => {
                let places = lists.range(&mut self.windows.1, i)?.0;
                let sample = |at| self.samples.item(lists.samples.at(&mut self.windows.0, at)? as usize);
                places.map(sample).collect()
            }
        }
    }

    /// Tokens of row `i`.
    ///
    /// # Errors
    /// As [`Rows::get`].
    pub fn tokens(&mut self, i: usize) -> Result<u64, Error> {
        match &self.rows.packed {
            Some(lists) if i < self.rows.len() => Ok(u64::from(lists.range(&mut self.windows.1, i)?.1)),
            _ => Ok(self.items(i)?.iter().map(|item| u64::from(item.tokens)).sum()),
        }
    }
}

/// Rows under construction.
#[derive(Default)]
pub(super) struct RowsWriter {
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
    pub fn row(&mut self, items: &[Item]) -> Result<(), Error> {
        let tokens: u64 = items.iter().map(|i| u64::from(i.tokens)).sum();
        self.rows.tokens += tokens;
        self.rows.weighted |= items.iter().any(|i| i.weighted);
        self.rows.has_teacher |= items.iter().any(|i| i.kept > 0);
        self.rows.targets += items.iter().map(|i| u64::from(i.targets)).sum::<u64>();
        self.rows.longest =
            items.iter().flat_map(|i| i.documents()).map(saturating_u32).fold(self.rows.longest, u32::max);
        if let Some((samples, ends)) = &mut self.lists {
            self.end += items.len();
            items.iter().try_for_each(|i| samples.push(i.sample))?;
            ends.push(saturating_u32(self.end))?;
            ends.push(u32::try_from(tokens).unwrap_or(u32::MAX))?;
        }
        Ok(())
    }

    /// Finishes the rows; without packing, the rows are the samples of `mix`.
    pub fn finish(self, mix: Mixture) -> Result<Rows, Error> {
        let packed = match self.lists {
            None => None,
            Some((samples, ends)) => Some(Lists { samples: samples.finish()?, ends: ends.finish()? }),
        };
        let single = if packed.is_none() { mix } else { Mixture::default() };
        Ok(Rows { single, packed, ..self.rows })
    }
}
