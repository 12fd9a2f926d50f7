//! One pass over a source: converts rows to samples on all cores, in bounded memory.

use super::record::SerializedSample;
use super::samples::StoreWriter;
use super::stats::SourceStats;
use crate::error::{Error, Problem, Problems};
use crate::read::{reader::Rows, row::RawRow};
use crate::shape::notes::Note;
use crate::tokenize::encode::Encoder;
use ft_base::error::Place;
use ft_base::store;
use ft_recipe::OnBadRow;
use indicatif::ProgressBar;
use rayon::prelude::*;
use std::path::{Path, PathBuf};

/// Rows and bytes per chunk of parallel tokenization.
const CHUNK: (usize, usize) = (4096, 16 << 20);

/// Error that ends a pass.
pub(crate) enum PassError {
    /// The data cannot be used.
    Data(Error),
    /// The samples cannot be written.
    Write(store::Error),
}

impl From<Error> for PassError {
    fn from(e: Error) -> Self {
        PassError::Data(e)
    }
}

impl From<store::Error> for PassError {
    fn from(e: store::Error) -> Self {
        PassError::Write(e)
    }
}

/// A pass over a source.
pub(crate) struct SourcePass<'a> {
    encoder: &'a Encoder<'a>,
    pub problems: Problems,
    bar: &'a ProgressBar,
    writer: &'a mut StoreWriter,
    pub found: SourceStats,
}

impl<'a> SourcePass<'a> {
    pub fn new(
        encoder: &'a Encoder<'a>,
        limit: Option<usize>,
        bar: &'a ProgressBar,
        writer: &'a mut StoreWriter,
    ) -> Self {
        let problems = Problems { limit, ..Problems::default() };
        Self { encoder, problems, bar, writer, found: SourceStats::default() }
    }

    /// Reads the files of a source, called `name` in the recipe.
    ///
    /// # Errors
    /// The first problem, unless problems are collected; a source without usable rows.
    pub fn over(&mut self, files: &[PathBuf], name: &str) -> Result<(), PassError> {
        let _cleared = Cleared(self.bar);
        for file in files {
            match self.file(file) {
                Err(PassError::Data(e)) if self.problems.limit.is_some() => self.problems.add(e),
                other => other?,
            }
        }
        if self.writer.count == 0 && self.problems.is_empty() {
            let last = |(place, why): &(Place, String)| format!("; the last: {place}: {why}");
            let last = self.found.left_out.last().map(last).unwrap_or_default();
            let message = format!("none of its {} rows can be trained on{last}", self.found.rows_read);
            return Err(Error::Empty { file: name.into(), message }.into());
        }
        Ok(())
    }

    fn file(&mut self, path: &Path) -> Result<(), PassError> {
        let name = path.display().to_string();
        let at = |(line, column)| Place { file: name.clone(), line, column };
        let mut rows = Rows::open(path, self.encoder.schema)?;
        let mut any = false;
        loop {
            let mut chunk: Vec<RawRow> = Vec::new();
            let mut bytes = 0;
            while chunk.len() < CHUNK.0 && bytes < CHUNK.1 {
                let Some(row) = rows.next() else { break };
                let row = row?;
                bytes += row.bytes.as_ref().map_or(0, Vec::len);
                chunk.push(row);
            }
            if chunk.is_empty() {
                break;
            }
            any = true;
            let encoder = self.encoder;
            let done: Vec<_> = chunk.par_iter().map(|row| encode_row(row, encoder)).collect();
            self.bar.inc(done.len() as u64);
            for (place, result) in done {
                self.found.rows_read += 1;
                match result {
                    Ok(made) => {
                        self.found.truncated += usize::from(made.cut);
                        self.found.whole.add(made.whole, 1);
                        if !made.notes.is_empty() {
                            self.found.notes.add(&at(place), made.notes);
                        }
                        self.writer.push(&made.sample);
                    }
                    Err(problem) => self.left_out(at(place), problem)?,
                }
            }
            self.writer.flush()?;
        }
        if any {
            Ok(())
        } else {
            Err(Error::Empty { file: name.clone(), message: "the file holds no rows".into() }.into())
        }
    }

    /// Counts a dropped row, or returns it as an error.
    fn left_out(&mut self, place: Place, problem: Problem) -> Result<(), Error> {
        let (data, drops) = (self.encoder.data, &mut self.found.drops);
        // Drops requested by the recipe are not errors; masks emptied by truncation are only counted.
        let (count, asked) = match &problem {
            Problem::Bad(_) | Problem::Tokenizer(_) => (&mut drops.bad, false),
            Problem::EmptyMask(_) => (&mut drops.empty_mask, false),
            Problem::EmptyAfterTruncation { .. } => (&mut drops.empty_after_truncation, true),
            Problem::TooLong { dropped, .. } => (&mut drops.too_long, *dropped),
        };
        *count += 1;
        if let Problem::TooLong { tokens, .. } | Problem::EmptyAfterTruncation { tokens, .. } = &problem {
            self.found.whole.add(*tokens, 1);
        }
        let too_long = matches!(problem, Problem::TooLong { .. });
        self.found.show(&place, &problem.to_string());
        let error = Error::Row { place, problem };
        match self.problems.limit {
            _ if asked => Ok(()),
            Some(_) => {
                self.problems.add(error);
                Ok(())
            }
            // over_length = "error" overrides on_bad_row
            None if data.on_bad_row == OnBadRow::Error || too_long => Err(error),
            None => Ok(()),
        }
    }
}

/// Clears a progress bar when dropped.
struct Cleared<'a>(&'a ProgressBar);

impl Drop for Cleared<'_> {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// A sample with the notes of a row.
struct SerializedRow {
    sample: SerializedSample,
    /// Number of tokens before truncation.
    whole: usize,
    cut: bool,
    notes: Vec<Note>,
}

/// A place (line, column) and the resulting sample or problem.
type One = ((usize, usize), Result<SerializedRow, Problem>);

fn encode_row(row: &RawRow, encoder: &Encoder<'_>) -> One {
    let value = match row.parse() {
        Ok(value) => value,
        Err(e) => return ((e.line, e.column), Err(Problem::Bad(e.message))),
    };
    let made = encoder.encode(value, row.line).map(|read| SerializedRow {
        sample: SerializedSample::of(&read.example),
        whole: read.whole,
        cut: read.whole > read.example.ids.len(),
        notes: read.notes,
    });
    ((row.line, 0), made)
}
