//! A data file's bytes as rows.

use super::error::Error;
use super::files::{self, Kind, Packed};
use super::format::Shape;
use super::tables::{Cells, Texts};
use crate::store;
use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Bytes that a row may have: books have some millions.
pub(super) const LONGEST_ROW: usize = 32 << 20;
/// Values that a row may have: in memory, one takes up to a hundred bytes.
const VALUES: usize = 8 << 20;
/// Bytes of a file that is one array, which is read whole.
const LONGEST_ARRAY: u64 = 512 << 20;

/// A row before it is parsed: as JSON, whatever its file has.
pub(super) struct RawRow {
    /// Line of the file where it begins, from 1; of a file without lines the number of the row.
    pub line: usize,
    /// Byte column of that line where it begins, from 1.
    pub column: usize,
    /// Its bytes, or why the file has none here.
    pub bytes: Result<Vec<u8>, String>,
}

/// A row that is not JSON.
pub(super) struct NotJson {
    pub line: usize,
    /// Byte column, from 1.
    pub column: usize,
    pub message: String,
}

impl RawRow {
    /// The row's value.
    pub fn parse(&self) -> Result<Value, NotJson> {
        let fail =
            |line: usize, column: usize, message: String| NotJson { line, column: column.max(1), message };
        let bytes = self.bytes.as_ref().map_err(|m| fail(self.line, self.column, m.clone()))?;
        if bytes.len() > LONGEST_ROW {
            return Err(fail(self.line, self.column, too_long()));
        }
        // each takes a byte at the least, and few rows have as many
        if bytes.len() >= VALUES {
            let values = values(bytes);
            if values > VALUES {
                let message =
                    format!("the row has {values} values, more than {VALUES}; split it into several");
                return Err(fail(self.line, self.column, message));
            }
        }
        if let Err(e) = std::str::from_utf8(bytes) {
            let before = &bytes[..e.valid_up_to()];
            let lines = before.iter().filter(|b| **b == b'\n').count();
            let in_line = before.len() - before.iter().rposition(|b| *b == b'\n').map_or(0, |p| p + 1);
            let column = if lines == 0 { self.column + in_line } else { in_line + 1 };
            return Err(fail(self.line + lines, column, "not UTF-8".into()));
        }
        serde_json::from_slice(bytes).map_err(|e| {
            let text = e.to_string();
            let message = text.rsplit_once(" at line ").map_or(text.as_str(), |t| t.0);
            let column = if e.line() <= 1 { self.column - 1 + e.column() } else { e.column() };
            fail(self.line + e.line().saturating_sub(1), column, format!("not JSON: {message}"))
        })
    }
}

pub(super) fn too_long() -> String {
    format!("the row is longer than {} MiB; split it into several", LONGEST_ROW >> 20)
}

/// How many values a row of JSON has, at the most.
fn values(bytes: &[u8]) -> usize {
    let (mut count, mut quoted, mut escaped) = (1, false, false);
    for b in bytes {
        match (quoted, b) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => quoted = !quoted,
            (false, b',' | b'[' | b'{' | b':') => count += 1,
            _ => {}
        }
    }
    count
}

/// The rows of a file, in order. After an error of reading there are no more.
pub(super) enum Rows {
    /// One row a line.
    Lines(Lines),
    /// The items of one array.
    Array(Array),
    /// The lines of a table.
    Cells(Box<Cells>),
    /// A text a line.
    Texts(Texts),
    #[cfg(feature = "parquet")]
    /// Rows of columns.
    Columns(Box<super::columns::Columns>),
}

/// The bytes of a file, unpacked.
fn unpacked(path: &Path, packed: Option<Packed>) -> io::Result<Box<dyn BufRead>> {
    let file = store::open_plain(path)?;
    let buffered = |r: Box<dyn Read>| Box::new(BufReader::with_capacity(1 << 18, r));
    Ok(buffered(match packed {
        None => Box::new(file),
        Some(Packed::Gzip) => Box::new(flate2::read::MultiGzDecoder::new(file)),
        Some(Packed::Zstd) => Box::new(zstd::Decoder::new(file)?),
    }))
}

impl Rows {
    /// Opens a file whose name says how it holds rows, for rows of a shape.
    pub fn open(path: &Path, shape: &Shape) -> Result<Self, Error> {
        let cannot = |cause| Error::Read { path: path.into(), cause };
        let (kind, packed) = files::kind(path).unwrap_or((Kind::Lines, None));
        let lines = || -> Result<Lines, Error> {
            let file = unpacked(path, packed).map_err(cannot)?;
            Ok(Lines { file, path: path.into(), line: 0 })
        };
        Ok(match kind {
            Kind::Lines => Rows::Lines(lines()?),
            Kind::Text => Rows::Texts(Texts::new(lines()?, shape.name("text"))),
            Kind::Array => {
                let bytes = match packed {
                    None => store::read_plain(path, LONGEST_ARRAY),
                    Some(_) => read_packed(path, packed),
                };
                let bytes = bytes.map_err(cannot)?;
                Rows::Array(Array { bytes, at: 0, line: 1, line_start: 0, state: State::Before })
            }
            Kind::Cells(between) => {
                let file = unpacked(path, packed).map_err(cannot)?;
                Rows::Cells(Box::new(Cells::open(file, path, between, shape)?))
            }
            #[cfg(feature = "parquet")]
            Kind::Parquet => Rows::Columns(Box::new(super::columns::Columns::open(path)?)),
            #[cfg(not(feature = "parquet"))]
            Kind::Parquet => {
                let what = "parquet files, in a build of ft without its parquet feature";
                return Err(Error::NotBuilt(format!("{} ({what})", path.display())));
            }
        })
    }
}

/// All bytes of a packed file.
fn read_packed(path: &Path, packed: Option<Packed>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    unpacked(path, packed)?.take(LONGEST_ARRAY + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > LONGEST_ARRAY {
        true => Err(io::Error::other(format!("it holds more than {} MiB, unpacked", LONGEST_ARRAY >> 20))),
        false => Ok(bytes),
    }
}

impl Iterator for Rows {
    type Item = Result<RawRow, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Rows::Lines(l) => l.next(),
            Rows::Array(a) => a.next().map(Ok),
            Rows::Cells(c) => c.next(),
            Rows::Texts(t) => t.next(),
            #[cfg(feature = "parquet")]
            Rows::Columns(c) => c.next(),
        }
    }
}

/// Rows of a JSON Lines file; lines of white space are no rows.
pub(super) struct Lines {
    file: Box<dyn BufRead>,
    path: PathBuf,
    line: usize,
}

impl Lines {
    /// The next line that is not white space alone.
    pub fn next(&mut self) -> Option<Result<RawRow, Error>> {
        loop {
            let mut bytes = Vec::new();
            let most = LONGEST_ROW as u64 + 2;
            let read = (&mut self.file).take(most).read_until(b'\n', &mut bytes);
            if let Err(cause) = read {
                return Some(Err(Error::Read { path: self.path.clone(), cause }));
            }
            if bytes.is_empty() {
                return None;
            }
            self.line += 1;
            if bytes.len() as u64 == most && bytes.last() != Some(&b'\n') {
                // the row is told and left out like any other; what follows it is read
                if let Err(cause) = self.file.skip_until(b'\n') {
                    return Some(Err(Error::Read { path: self.path.clone(), cause }));
                }
                return Some(Ok(RawRow { line: self.line, column: 1, bytes: Err(too_long()) }));
            }
            let mut column = 1;
            if self.line == 1 && bytes.starts_with(b"\xEF\xBB\xBF") {
                bytes.drain(..3);
                column = 4;
            }
            while matches!(bytes.last(), Some(b'\n' | b'\r')) {
                bytes.pop();
            }
            if !bytes.trim_ascii().is_empty() {
                return Some(Ok(RawRow { line: self.line, column, bytes: Ok(bytes) }));
            }
        }
    }
}

/// Rows of a file that is one JSON array: cut at the commas between items, so that each item is parsed alone and
/// one bad item does not take the others with it.
pub(super) struct Array {
    bytes: Vec<u8>,
    at: usize,
    line: usize,
    line_start: usize,
    state: State,
}

#[derive(PartialEq)]
enum State {
    Before,
    Inside,
    Done,
}

impl Array {
    fn next(&mut self) -> Option<RawRow> {
        match self.state {
            State::Done => return None,
            State::Before => {
                if self.bytes.starts_with(b"\xEF\xBB\xBF") {
                    self.at = 3;
                }
                self.skip_space();
                match self.bytes.get(self.at) {
                    None => {
                        self.state = State::Done;
                        return None;
                    }
                    Some(b'[') => self.at += 1,
                    Some(_) => {
                        return Some(self.broken(
                            "expected an array of rows; a file with one object a line is named .jsonl",
                        ));
                    }
                }
                self.skip_space();
                self.state = State::Inside;
                if self.bytes.get(self.at) == Some(&b']') {
                    return self.close();
                }
            }
            State::Inside => {}
        }
        self.skip_space();
        let (line, column) = (self.line, self.at - self.line_start + 1);
        let start = self.at;
        let Some(end) = self.item_end() else {
            self.state = State::Done;
            let bytes = self.bytes[start..].to_vec();
            let rest = if bytes.trim_ascii().is_empty() {
                Err("the file ends where a row should begin".into())
            } else {
                Ok(bytes)
            };
            // A whole value without the closing bracket would parse: the file is cut all the same.
            let row = RawRow { line, column, bytes: rest };
            return Some(match row.parse() {
                Ok(_) => self.broken("the file ends before the array's closing bracket"),
                Err(_) => row,
            });
        };
        let bytes = self.bytes[start..end].to_vec();
        if self.bytes[end] == b',' {
            self.at = end + 1;
        } else if let Some(broken) = self.close() {
            return Some(broken);
        }
        Some(RawRow { line, column, bytes: Ok(bytes) })
    }

    /// Behind the last item: nothing may follow the bracket.
    fn close(&mut self) -> Option<RawRow> {
        self.at += 1;
        self.skip_space();
        self.state = State::Done;
        (self.at < self.bytes.len()).then(|| self.broken("text after the end of the array"))
    }

    fn broken(&mut self, why: &str) -> RawRow {
        self.state = State::Done;
        let column = self.at - self.line_start + 1;
        RawRow { line: self.line, column, bytes: Err(why.into()) }
    }

    fn skip_space(&mut self) {
        while let Some(b' ' | b'\t' | b'\r' | b'\n') = self.bytes.get(self.at) {
            self.step();
        }
    }

    fn step(&mut self) {
        if self.bytes[self.at] == b'\n' {
            self.line += 1;
            self.line_start = self.at + 1;
        }
        self.at += 1;
    }

    /// Goes to the comma or bracket that ends the item.
    fn item_end(&mut self) -> Option<usize> {
        let (mut depth, mut quoted) = (0usize, false);
        while let Some(&b) = self.bytes.get(self.at) {
            if quoted {
                match b {
                    b'\\' if self.at + 1 < self.bytes.len() => self.step(),
                    b'"' => quoted = false,
                    _ => {}
                }
            } else {
                match b {
                    b'"' => quoted = true,
                    b'{' | b'[' => depth += 1,
                    b',' | b']' if depth == 0 => return Some(self.at),
                    b'}' | b']' => depth = depth.saturating_sub(1),
                    _ => {}
                }
            }
            self.step();
        }
        None
    }
}
