//! One pass over a source: converts rows to samples on all cores, in bounded memory.

use super::record::SerializedSample;
use super::samples::StoreWriter;
use super::stats::SourceStats;
use crate::error::{Error, Others, Problem, Problems};
use crate::read::{detect::shape_of, reader::Rows, row::RawRow};
use crate::shape::{notes::Note, values::MISSING};
use crate::tokenize::encode::{EncodedRow, Encoder};
use ft_base::error::Location;
use ft_base::store;
use ft_base::terminal::plural;
use ft_recipe::{Format, OnBadRow, ScoreTargets, Source};
use indicatif::ProgressBar;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Rows and bytes per chunk of parallel tokenization.
const CHUNK: (usize, usize) = (4096, 16 << 20);

/// Number of bad rows after which reading on shows nothing new.
const HOPELESS: usize = 1_000_000;

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
    problems: &'a mut Problems,
    bar: &'a ProgressBar,
    writer: &'a mut StoreWriter,
    pub found: SourceStats,
    /// Whether no problem was found.
    pub clean: bool,
    /// The rows to read, and the number of rows passed.
    rows: Range<usize>,
    passed: usize,
    /// Number of all rows, if the slice depends on it.
    total: Option<usize>,
}

impl<'a> SourcePass<'a> {
    pub fn new(
        encoder: &'a Encoder<'a>,
        problems: &'a mut Problems,
        bar: &'a ProgressBar,
        writer: &'a mut StoreWriter,
    ) -> Self {
        let found = SourceStats::default();
        let rows = 0..usize::MAX;
        Self { encoder, problems, bar, writer, found, clean: true, rows, passed: 0, total: None }
    }

    /// Reads the files of a source, called `name` in the recipe.
    ///
    /// # Errors
    /// The first problem, unless problems are collected; a source without usable rows.
    pub fn over(&mut self, files: &[PathBuf], source: &Source) -> Result<(), PassError> {
        let (_cleared, name) = (Cleared(self.bar), &source.source);
        self.rows = self.range(files, source)?;
        let mut without_rows = Vec::new();
        for file in files {
            if self.passed >= self.rows.end {
                break;
            }
            match self.file(file) {
                Ok(true) => {}
                Ok(false) => without_rows.push(file.display().to_string()),
                Err(PassError::Data(e)) if self.problems.limit.is_some() => self.add(e),
                Err(e) => return Err(e),
            }
        }
        self.note_empty(without_rows)?;
        if self.found.rows_read == 0 && self.clean && source.is_part() {
            // reading ends at the end of the slice
            let all = self.total.or((self.passed < self.rows.end).then_some(self.passed));
            let rows = all.map_or("rows".into(), |all| plural(all, "row"));
            let split = source.split.as_deref().unwrap_or_default();
            let message = format!("split = {split:?} selects none of its {rows}");
            return Err(Error::Empty { file: name.into(), message }.into());
        }
        if self.writer.count == 0 && self.clean {
            let last = |(place, why): &(Location, String)| format!("; the last: {place}: {why}");
            let last = self.found.left_out.last().map(last).unwrap_or_default();
            let message = format!("none of its {} rows can be trained on{last}", self.found.rows_read);
            return Err(Error::Empty { file: name.into(), message }.into());
        }
        Ok(())
    }

    /// Notes files without rows; an error if no file has rows.
    fn note_empty(&mut self, files: Vec<String>) -> Result<(), Error> {
        let all = self.passed == 0 && self.clean;
        for file in files {
            if !all {
                let place = Location { file, line: 0, column: 0 };
                self.found.notes.add(&place, vec![Note::NoRows]);
                continue;
            }
            let error = Error::Empty { file, message: "the file holds no rows".into() };
            if self.problems.limit.is_none() {
                return Err(error);
            }
            self.add(error);
        }
        Ok(())
    }

    /// The rows to read, by slice and `max_samples`.
    fn range(&mut self, files: &[PathBuf], source: &Source) -> Result<Range<usize>, Error> {
        let (_, slice) = source.slice();
        if slice.needs_total() {
            let mut total = 0;
            for file in files {
                for row in Rows::open(file, self.encoder.schema)? {
                    row?;
                    total += 1;
                }
            }
            self.total = Some(total);
        }
        let rows = slice.rows(self.total.unwrap_or(usize::MAX));
        let most = source.max_samples.map_or(usize::MAX, |n| rows.start.saturating_add(n));
        Ok(rows.start..rows.end.min(most))
    }

    /// Reads a file. Returns whether it holds rows.
    fn file(&mut self, path: &Path) -> Result<bool, PassError> {
        let name = path.display().to_string();
        let at = |(line, column)| Location { file: name.clone(), line, column };
        let mut rows = Rows::open(path, self.encoder.schema)?;
        let classes = class_names(&rows, self.encoder);
        let mut any = false;
        loop {
            let mut chunk: Vec<RawRow> = Vec::new();
            let (mut bytes, mut end) = (0, Ok(()));
            while chunk.len() < CHUNK.0 && bytes < CHUNK.1 && self.passed < self.rows.end {
                let row = match rows.next().transpose() {
                    Ok(Some(row)) => row,
                    // an error is returned behind those of the rows before it
                    other => {
                        end = other.map(|_| ());
                        break;
                    }
                };
                (any, self.passed) = (true, self.passed + 1);
                if self.passed <= self.rows.start {
                    continue;
                }
                bytes += row.bytes.as_ref().map_or(0, Vec::len);
                chunk.push(row);
            }
            if chunk.is_empty() {
                end?;
                break;
            }
            let encoder = self.encoder;
            let done: Vec<_> =
                chunk.par_iter().map(|row| encode_row(row, encoder, classes.as_deref())).collect();
            self.bar.inc(done.len() as u64);
            for (place, result) in done {
                self.found.rows_read += 1;
                match result {
                    Ok(made) => {
                        *self.found.cut_by(encoder.data.over_length) += usize::from(made.cut);
                        self.found.whole.add(made.whole, 1);
                        made.teacher.into_iter().for_each(|by| self.found.add_teacher(by));
                        if !made.notes.is_empty() {
                            self.found.notes.add(&at(place), made.notes);
                        }
                        made.samples.iter().for_each(|sample| self.writer.push(sample));
                    }
                    Err(problem) => self.left_out(at(place), problem)?,
                }
            }
            self.writer.flush()?;
            if let Some(why) = self.hopeless() {
                return Err(Error::Empty { file: name, message: why }.into());
            }
            end?;
        }
        Ok(any)
    }

    /// The reason to read no further: many rows, and only problems.
    fn hopeless(&self) -> Option<String> {
        let (read, bad) = (self.found.rows_read, self.found.drops.bad);
        if read >= HOPELESS && self.writer.count == 0 {
            Some(format!("none of the first {read} rows can be trained on: the rest is not read"))
        } else if self.problems.limit.is_some() && !self.clean && bad >= HOPELESS {
            Some(format!("{bad} bad rows: the rest is not read"))
        } else {
            None
        }
    }

    /// Counts a dropped row, or returns it as an error.
    fn left_out(&mut self, place: Location, problem: Problem) -> Result<(), Error> {
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
        // over_length = "error" overrides on_bad_row
        if asked || (data.on_bad_row == OnBadRow::Skip && !too_long) {
            return Ok(());
        }
        let error = Error::Row { place, problem, more: Others::default() };
        if self.problems.limit.is_none() {
            return Err(error);
        }
        self.add(error);
        Ok(())
    }

    fn add(&mut self, problem: Error) {
        self.clean = false;
        self.problems.add(problem);
    }
}

/// Clears a progress bar when dropped.
struct Cleared<'a>(&'a ProgressBar);

impl Drop for Cleared<'_> {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// A place (line, column) and the resulting sample or problem.
type One = ((usize, usize), Result<EncodedRow<SerializedSample>, Problem>);

/// Names of the numbers in a file's column of labels, if some are the recipe's. Otherwise numbers are those of the
/// recipe's classes.
fn class_names(rows: &Rows, encoder: &Encoder<'_>) -> Option<Vec<String>> {
    let (ScoreTargets::Classes(classes), Format::Labeled) = (&encoder.data.scores, encoder.schema.format)
    else {
        return None;
    };
    let names = rows.class_names(encoder.schema.name("label"))?;
    names.iter().any(|name| classes.contains(name)).then_some(names)
}

/// Encodes a row; `classes` are names in the file of the numbers of its class.
fn encode_row(row: &RawRow, encoder: &Encoder<'_>, classes: Option<&[String]>) -> One {
    let mut value = match row.parse() {
        Ok(value) => value,
        Err(e) => return ((e.line, e.column), Err(Problem::Bad(e.message))),
    };
    if let Some(Err(why)) = classes.map(|names| encoder.schema.name_class(&mut value, names)) {
        return ((row.line, 0), Err(Problem::Bad(why)));
    }
    let made = encoder.encode(value, row.line).map(|made| {
        let cut = made.cut;
        made.map(|i, e| SerializedSample::of(&e).marked(cut && i == 0, i > 0))
    });
    let made = made.map_err(|problem| match problem {
        Problem::Bad(message) if message.starts_with(MISSING) => {
            let hint = other_format(row, encoder.schema.format).unwrap_or_default();
            Problem::Bad(message + &hint)
        }
        other => other,
    });
    ((row.line, 0), made)
}

/// A hint for a row with the fields of another format than its source's.
fn other_format(row: &RawRow, format: Format) -> Option<String> {
    let shape = shape_of(&BTreeMap::new(), row.parse().ok()?.as_object()?).filter(|s| s.format != format)?;
    Some(format!(
        "\n  hint: a row with these fields is of {}, not {:?}; data.train=FILE on the command line takes a file \
         without the recipe's format",
        shape.keys(),
        format.word()
    ))
}
