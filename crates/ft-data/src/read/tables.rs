//! Rows of CSV and TSV tables, and of plain-text files.

use super::lines::Lines;
use super::row::{LONGEST_ROW, RawRow, too_long};
use crate::error::{Error, Problem};
use crate::shape::schema::Schema;
use csv::{ByteRecord, ErrorKind};
use ft_base::error::Place;
use ft_base::store::json;
use serde_json::{Map, Value};
use std::cell::Cell;
use std::io::{self, BufRead, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Progress within the current row.
#[derive(Default)]
struct Progress {
    /// Remaining byte budget; limits the size of a row.
    left: Cell<usize>,
    /// First non-blank line of the row; 0 before the start.
    begins: Cell<usize>,
    /// Last line passed to the parser, from 1.
    line: Cell<usize>,
}

/// Passes a file to the table parser at most one line at a time. Without read-ahead past the end of a row,
/// the next row starts on a line passed later.
struct LineReader {
    inner: Box<dyn BufRead>,
    progress: Rc<Progress>,
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
        let Progress { left, begins, line } = &*self.progress;
        line.set(line.get() + usize::from(self.ended && read > 0));
        if begins.get() == 0 && part.iter().any(|b| !matches!(b, b'\r' | b'\n')) {
            begins.set(line.get());
        }
        self.ended = part.last().map_or(self.ended, |b| *b == b'\n');
        self.inner.consume(read);
        match left.get().checked_sub(read) {
            Some(rest) => left.set(rest),
            None => return Err(io::Error::new(io::ErrorKind::InvalidData, too_long())),
        }
        Ok(read)
    }
}

/// A text table (CSV, TSV) with column names in the first line. Columns read as a list or object contain
/// JSON.
pub(crate) struct Table {
    reader: csv::Reader<LineReader>,
    path: PathBuf,
    names: Vec<String>,
    /// For every column, whether it contains JSON.
    json: Vec<bool>,
    progress: Rc<Progress>,
    record: ByteRecord,
}

impl Table {
    /// Opens a table and reads the column names.
    pub fn open(file: Box<dyn BufRead>, path: &Path, delimiter: u8, schema: &Schema) -> Result<Self, Error> {
        let progress = Rc::new(Progress::default());
        progress.left.set(LONGEST_ROW);
        let lines = LineReader { inner: file, progress: progress.clone(), ended: true };
        let mut reader =
            csv::ReaderBuilder::new().delimiter(delimiter).buffer_capacity(1 << 16).from_reader(lines);
        let head = |message: String| Error::Row {
            place: Place { file: path.display().to_string(), line: progress.begins.get(), column: 1 },
            problem: Problem::Bad(message),
        };
        let cannot = |e: csv::Error| match e.into_kind() {
            ErrorKind::Io(cause) => Error::read(path, cause),
            other => head(format!("not a table: {other:?}")),
        };
        let record = reader.byte_headers().map_err(cannot)?;
        let mut names = Vec::new();
        for cell in record {
            let name =
                std::str::from_utf8(cell).map_err(|_| head("a name of a column is not UTF-8".into()))?;
            if names.iter().any(|n| n == name) {
                return Err(head(format!("two columns are named {name:?}")));
            }
            names.push(name.to_string());
        }
        let json = names.iter().map(|n| schema.holds_json(n)).collect();
        Ok(Self { reader, path: path.into(), names, json, progress, record: ByteRecord::new() })
    }

    /// Returns the next row.
    pub fn next(&mut self) -> Result<Option<RawRow>, Error> {
        self.progress.left.set(LONGEST_ROW);
        self.progress.begins.set(0);
        let before = self.progress.line.get();
        let read = self.reader.read_byte_record(&mut self.record);
        // rows separated by a bare carriage return share a line
        let line = Some(self.progress.begins.get()).filter(|l| *l > 0).unwrap_or(before);
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
        for ((cell, name), json) in self.record.iter().zip(&self.names).zip(&self.json) {
            let text = std::str::from_utf8(cell).map_err(|_| format!("{name}: not UTF-8"))?;
            let value = match (json, text.trim().is_empty()) {
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
            let text = String::from_utf8(text).map_err(|_| "not UTF-8".to_string())?;
            let row = Map::from_iter([(self.name.clone(), Value::from(text))]);
            serde_json::to_vec(&row).map_err(|e| e.to_string())
        };
        Ok(Some(RawRow { bytes: row.bytes.and_then(object), ..row }))
    }
}
