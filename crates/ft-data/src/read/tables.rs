//! Rows of CSV and TSV tables, and of plain-text files.

use super::lines::Lines;
use super::quotes::{Quotes, given_separator, separator};
use super::row::{LONGEST_ROW, RawRow, too_long};
use crate::error::Error;
use crate::shape::schema::Schema;
use csv::{ByteRecord, ErrorKind};
use ft_base::error::Location;
use ft_base::store::json;
use serde_json::{Map, Value};
use std::cell::Cell;
use std::collections::HashSet;
use std::io::{self, BufRead, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Longest line of column names searched for the separator, in bytes.
const LONGEST_NAMES: u64 = 1 << 20;
/// The message about other encodings.
const NOT_UTF8: &str = "not UTF-8, but perhaps Latin-1 or Windows-1252\n  hint: encoding = \"windows-1252\", beside \
                        source";

/// The error of a cell without a closing quote: at the end of the file or of the longest row, or with text after the
/// closing quote.
fn unclosed(progress: &Progress, path: &Path) -> Option<Error> {
    let quotes = progress.quotes.get();
    let open = quotes.is_open() && (progress.at_end.get() || progress.left.get() == 0);
    let what = match (open, quotes.stray) {
        (true, _) => "the quote that opens a cell in this line is not closed",
        (_, true) => {
            "the quote that opens a cell in this line is closed inside of a text: one of them is missing, or \
                      to be doubled"
        }
        _ => return None,
    };
    Some(Error::File {
        place: Location { file: path.display().to_string(), line: quotes.opened, column: 0 },
        message: what.into(),
    })
}

/// Progress within the current row.
#[derive(Default)]
struct Progress {
    /// Remaining byte budget; limits the size of a row.
    left: Cell<usize>,
    /// First non-blank line of the row; 0 before the start.
    begins: Cell<usize>,
    /// Last line passed to the parser, from 1.
    line: Cell<usize>,
    quotes: Cell<Quotes>,
    /// Whether the file was read to its end.
    at_end: Cell<bool>,
}

/// Passes a file to the table parser at most one line at a time. Without read-ahead past the end of a row,
/// the next row starts on a line passed later.
struct LineReader {
    inner: Box<dyn BufRead>,
    progress: Rc<Progress>,
    delimiter: u8,
    /// Whether the last line was passed completely.
    ended: bool,
}

impl Read for LineReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let there = self.inner.fill_buf()?;
        let most = &there[..there.len().min(buffer.len())];
        let read = most.iter().position(|b| *b == b'\n').map_or(most.len(), |at| at + 1);
        let part = &most[..read];
        buffer[..read].copy_from_slice(part);
        let Progress { left, begins, line, quotes, at_end } = &*self.progress;
        line.set(line.get() + usize::from(self.ended && read > 0));
        if begins.get() == 0 && part.iter().any(|b| !matches!(b, b'\r' | b'\n')) {
            begins.set(line.get());
        }
        let mut now = quotes.get();
        now.read(part, self.delimiter, line.get());
        quotes.set(now);
        at_end.set(read == 0 && !buffer.is_empty());
        self.ended = part.last().map_or(self.ended, |b| *b == b'\n');
        self.inner.consume(read);
        match left.get().checked_sub(read) {
            Some(rest) => left.set(rest),
            None => {
                left.set(0);
                return Err(io::Error::new(io::ErrorKind::InvalidData, too_long()));
            }
        }
        Ok(read)
    }
}

/// Reads the next line, as far as it is searched.
fn line_of_names(file: &mut dyn BufRead) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    file.take(LONGEST_NAMES).read_until(b'\n', &mut line)?;
    Ok(line)
}

/// A column of a table.
struct Column {
    name: String,
    /// Whether the first line names it.
    named: bool,
    /// Whether it contains JSON.
    json: bool,
}

/// A text table (CSV, TSV) with column names in the first line. Columns read as a list or object contain
/// JSON.
pub(crate) struct Table {
    reader: csv::Reader<LineReader>,
    path: PathBuf,
    columns: Vec<Column>,
    progress: Rc<Progress>,
    record: ByteRecord,
}

impl Table {
    /// Opens a table and reads the column names; `usual` is the separator of the file type.
    pub fn open(mut file: Box<dyn BufRead>, path: &Path, usual: u8, schema: &Schema) -> Result<Self, Error> {
        let progress = Rc::new(Progress::default());
        progress.left.set(LONGEST_ROW);
        let mut line = || line_of_names(&mut file).map_err(|e| Error::read(path, e));
        let mut first = line()?;
        let given = given_separator(&first);
        if given.is_some() {
            first = line()?;
            progress.line.set(1);
        }
        let names = first.split(|b| *b == b'\r').next().unwrap_or_default();
        let delimiter = given.unwrap_or_else(|| separator(names, usual));
        let inner: Box<dyn BufRead> = Box::new(io::Cursor::new(first).chain(file));
        let lines = LineReader { inner, progress: progress.clone(), delimiter, ended: true };
        let mut reader =
            csv::ReaderBuilder::new().delimiter(delimiter).buffer_capacity(1 << 16).from_reader(lines);
        let head = |message: String| Error::File {
            place: Location { file: path.display().to_string(), line: progress.begins.get(), column: 1 },
            message,
        };
        let cannot = |e: csv::Error| match e.into_kind() {
            ErrorKind::Io(cause) => Error::read(path, cause),
            other => head(format!("not a table: {other:?}")),
        };
        let record = reader.byte_headers().map_err(cannot)?;
        if record.is_empty() {
            let (file, message) = (path.display().to_string(), "the file holds no names of columns".into());
            return Err(Error::Empty { file, message });
        }
        let (mut columns, mut seen) = (Vec::new(), HashSet::new());
        for (i, cell) in record.iter().enumerate() {
            let name =
                std::str::from_utf8(cell).map_err(|_| head(format!("a name of a column is {NOT_UTF8}")))?;
            // spreadsheets write separators behind the last name
            let named = !name.trim().is_empty();
            let name = if named { name.trim().to_string() } else { format!("column {}", i + 1) };
            if !seen.insert(name.clone()) {
                return Err(head(format!("two columns are named {name:?}")));
            }
            columns.push(Column { named, json: schema.holds_json(&name), name });
        }
        if let Some(e) = unclosed(&progress, path) {
            return Err(e);
        }
        Ok(Self { reader, path: path.into(), columns, progress, record: ByteRecord::new() })
    }

    /// Returns the next row. Rows of blank cells are skipped, as spreadsheets write them below a table.
    pub fn next(&mut self) -> Result<Option<RawRow>, Error> {
        loop {
            let row = self.next_record()?;
            if row.is_none() || !self.record.iter().all(|cell| cell.trim_ascii().is_empty()) {
                return Ok(row);
            }
        }
    }

    /// Returns the next record, and leaves its cells in `self.record`.
    fn next_record(&mut self) -> Result<Option<RawRow>, Error> {
        self.progress.left.set(LONGEST_ROW);
        self.progress.begins.set(0);
        let before = self.progress.line.get();
        let read = self.reader.read_byte_record(&mut self.record);
        // rows separated by a bare carriage return share a line
        let line = Some(self.progress.begins.get()).filter(|l| *l > 0).unwrap_or(before);
        if let Some(e) = unclosed(&self.progress, &self.path) {
            return Err(e);
        }
        let bytes = match read.map_err(csv::Error::into_kind) {
            Ok(false) => return Ok(None),
            Ok(true) => self.row(),
            Err(ErrorKind::UnequalLengths { expected_len, len, .. }) => {
                Err(format!("the row has {len} cells, and the first line names {expected_len} columns"))
            }
            Err(ErrorKind::Io(cause)) => return Err(Error::read(&self.path, cause)),
            Err(other) => return Err(Error::read(&self.path, io::Error::other(format!("{other:?}")))),
        };
        Ok(Some(RawRow { line, column: 1, bytes }))
    }

    /// The record as a JSON object.
    fn row(&self) -> Result<Vec<u8>, String> {
        let mut row = Map::new();
        for (cell, Column { name, named, json }) in self.record.iter().zip(&self.columns) {
            let text = std::str::from_utf8(cell).map_err(|_| format!("{name}: {NOT_UTF8}"))?;
            if !named && text.trim().is_empty() {
                continue;
            }
            let value = match (json, text.trim().is_empty()) {
                (false, _) if text.contains('\r') => text.replace("\r\n", "\n").replace('\r', "\n").into(),
                (false, _) => Value::from(text),
                (true, true) => Value::Null,
                (true, false) => json::value(cell).map_err(|e| {
                    let not_json = "expected JSON, as the format reads a list here";
                    format!("{name}: {}", json::describe(&e, not_json))
                })?,
            };
            row.insert(name.clone(), value);
        }
        serde_json::to_vec(&row).map_err(|e| e.to_string())
    }
}

/// A file with one text per line.
pub(crate) struct Texts {
    lines: Lines,
    name: String,
}

impl Texts {
    /// Rows with the line in field `name`.
    pub fn new(lines: Lines, name: &str) -> Self {
        Self { lines, name: name.into() }
    }

    /// Returns the next row.
    pub fn next(&mut self) -> Result<Option<RawRow>, Error> {
        let Some(row) = self.lines.next()? else { return Ok(None) };
        let object = |text: Vec<u8>| {
            let text = String::from_utf8(text).map_err(|_| NOT_UTF8.to_string())?;
            let row = Map::from_iter([(self.name.clone(), Value::from(text))]);
            serde_json::to_vec(&row).map_err(|e| e.to_string())
        };
        Ok(Some(RawRow { bytes: row.bytes.and_then(object), ..row }))
    }
}
