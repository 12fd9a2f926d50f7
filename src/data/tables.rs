//! Rows of tables of text, and of plain texts.

use super::error::Error;
use super::format::Shape;
use super::reader::{LONGEST_ROW, Lines, RawRow, too_long};
use super::strict;
use csv::{ByteRecord, ErrorKind};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::io::{self, BufRead, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Bytes that a reader may give before somebody fills it up again: what a row takes is bounded so.
struct Rationed {
    inner: Box<dyn BufRead>,
    left: Rc<Cell<usize>>,
}

impl Read for Rationed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        match self.left.get().checked_sub(read) {
            Some(left) => self.left.set(left),
            None => return Err(io::Error::new(io::ErrorKind::InvalidData, too_long())),
        }
        Ok(read)
    }
}

/// A table of text (CSV, TSV) with the names of its columns in the first line. A column that the format reads as a list
/// or an object holds it as JSON.
pub(super) struct Cells {
    reader: csv::Reader<Rationed>,
    path: PathBuf,
    names: Vec<String>,
    /// Of each column, whether it holds JSON.
    json: Vec<bool>,
    left: Rc<Cell<usize>>,
    record: ByteRecord,
}

impl Cells {
    /// Opens a table and reads its names.
    pub fn open(file: Box<dyn BufRead>, path: &Path, between: u8, shape: &Shape) -> Result<Self, Error> {
        let left = Rc::new(Cell::new(LONGEST_ROW));
        let rationed = Rationed { inner: file, left: left.clone() };
        let mut reader =
            csv::ReaderBuilder::new().delimiter(between).buffer_capacity(1 << 16).from_reader(rationed);
        let head = |message: String| Error::Row {
            place: crate::error::Place { file: path.display().to_string(), line: 1, column: 1 },
            problem: super::Problem::Bad(message),
        };
        let cannot = |e: csv::Error| match e.into_kind() {
            ErrorKind::Io(cause) => Error::Read { path: path.into(), cause },
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
        let json = names.iter().map(|n| shape.holds_json(n)).collect();
        Ok(Self { reader, path: path.into(), names, json, left, record: ByteRecord::new() })
    }

    /// The next row.
    pub fn next(&mut self) -> Option<Result<RawRow, Error>> {
        self.left.set(LONGEST_ROW);
        let line = |p: Option<&csv::Position>| p.map_or(0, |p| usize::try_from(p.line()).unwrap_or(0));
        match self.reader.read_byte_record(&mut self.record) {
            Ok(false) => None,
            Ok(true) => {
                let line = line(self.record.position());
                Some(Ok(RawRow { line, column: 1, bytes: self.row() }))
            }
            Err(e) => Some(match e.into_kind() {
                ErrorKind::UnequalLengths { pos, expected_len, len } => {
                    let bytes = Err(format!(
                        "the row has {len} cells, and the first line names {expected_len} columns"
                    ));
                    Ok(RawRow { line: line(pos.as_ref()), column: 1, bytes })
                }
                ErrorKind::Io(cause) => Err(Error::Read { path: self.path.clone(), cause }),
                other => Err(Error::Read {
                    path: self.path.clone(),
                    cause: io::Error::other(format!("{other:?}")),
                }),
            }),
        }
    }

    /// The record as an object.
    fn row(&self) -> Result<Vec<u8>, String> {
        let mut row = Map::new();
        for ((cell, name), json) in self.record.iter().zip(&self.names).zip(&self.json) {
            let text = std::str::from_utf8(cell).map_err(|_| format!("{name}: not UTF-8"))?;
            let value = match (json, text.trim().is_empty()) {
                (false, _) => Value::from(text),
                (true, true) => Value::Null,
                (true, false) => strict::value(cell).map_err(|e| {
                    let not_json = "expected JSON, as the format reads a list here";
                    format!("{name}: {}", strict::told(&e, not_json))
                })?,
            };
            row.insert(name.clone(), value);
        }
        serde_json::to_vec(&row).map_err(|e| e.to_string())
    }
}

/// A file of texts, one a line.
pub(super) struct Texts {
    lines: Lines,
    name: String,
}

impl Texts {
    /// Rows of which the field `name` is the line.
    pub fn new(lines: Lines, name: &str) -> Self {
        Self { lines, name: name.into() }
    }

    /// The next row.
    pub fn next(&mut self) -> Option<Result<RawRow, Error>> {
        let row = match self.lines.next()? {
            Ok(row) => row,
            Err(e) => return Some(Err(e)),
        };
        let object = |text: Vec<u8>| {
            let text = String::from_utf8(text).map_err(|_| "not UTF-8".to_string())?;
            let row = Map::from_iter([(self.name.clone(), Value::from(text))]);
            serde_json::to_vec(&row).map_err(|e| e.to_string())
        };
        Some(Ok(RawRow { bytes: row.bytes.and_then(object), ..row }))
    }
}
