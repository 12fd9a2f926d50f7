//! Splits data files into rows.

use super::array::Array;
use super::error::Error;
use super::files::{self, Kind, Packed};
use super::format::Shape;
use super::strict;
use super::tables::{Cells, Texts};
use ft_base::store;
use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Largest row in bytes; books have several million.
pub(super) const LONGEST_ROW: usize = 32 << 20;
/// Largest number of JSON values in a row; a value takes up to a hundred bytes of memory.
const VALUES: usize = 8 << 20;

/// An unparsed row, as JSON text for every file type.
pub(super) struct RawRow {
    /// First line of the row, from 1; the row number in files without lines.
    pub line: usize,
    /// First column of the row, in bytes from 1.
    pub column: usize,
    /// The JSON text, or the reason for a missing row.
    pub bytes: Result<Vec<u8>, String>,
}

/// A parse error.
pub(super) struct NotJson {
    pub line: usize,
    /// In bytes, from 1.
    pub column: usize,
    pub message: String,
}

impl RawRow {
    /// Parses the row.
    pub fn parse(&self) -> Result<Value, NotJson> {
        let fail =
            |line: usize, column: usize, message: String| NotJson { line, column: column.max(1), message };
        let bytes = self.bytes.as_ref().map_err(|m| fail(self.line, self.column, m.clone()))?;
        if bytes.len() > LONGEST_ROW {
            return Err(fail(self.line, self.column, too_long()));
        }
        // a value takes at least one byte; few rows are long enough to need the count
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
        strict::value(bytes).map_err(|e| {
            let text = strict::told(&e, "not JSON");
            let message = text.rsplit_once(" at line ").map_or(text.as_str(), |t| t.0);
            let column = if e.line() <= 1 { self.column - 1 + e.column() } else { e.column() };
            fail(self.line + e.line().saturating_sub(1), column, message.into())
        })
    }
}

pub(super) fn too_long() -> String {
    format!("the row is longer than {} MiB; split it into several", LONGEST_ROW >> 20)
}

/// Upper bound of the number of values in a JSON text.
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

/// Iterates over the rows of a file. A read error ends the iteration.
pub(super) enum Rows {
    /// One row per line.
    Lines(Lines),
    /// Items of one array.
    Array(Array),
    /// Rows of a table.
    Cells(Box<Cells>),
    /// One text per line.
    Texts(Texts),
    #[cfg(feature = "parquet")]
    /// Rows of a Parquet file.
    Columns(Box<super::columns::Columns>),
}

/// Opens a file, with decompression.
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
    /// Opens a file in the format given by the file name, for rows of `shape`.
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
            Kind::Array => Rows::Array(Array::new(unpacked(path, packed).map_err(cannot)?, path.into())),
            Kind::Cells(between) => {
                let file = unpacked(path, packed).map_err(cannot)?;
                Rows::Cells(Box::new(Cells::open(file, path, between, shape)?))
            }
            #[cfg(feature = "parquet")]
            Kind::Parquet => Rows::Columns(Box::new(super::columns::Columns::open(path, shape)?)),
            #[cfg(not(feature = "parquet"))]
            Kind::Parquet => {
                let what = "parquet files, in a build of ft without its parquet feature";
                return Err(Error::NotBuilt(format!("{} ({what})", path.display())));
            }
        })
    }
}

impl Iterator for Rows {
    type Item = Result<RawRow, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Rows::Lines(l) => l.next(),
            Rows::Array(a) => a.next(),
            Rows::Cells(c) => c.next(),
            Rows::Texts(t) => t.next(),
            #[cfg(feature = "parquet")]
            Rows::Columns(c) => c.next(),
        }
    }
}

/// Rows of a JSON Lines file; blank lines are skipped.
pub(super) struct Lines {
    file: Box<dyn BufRead>,
    path: PathBuf,
    line: usize,
}

impl Lines {
    /// Returns the next non-blank line.
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
                // reported and dropped like any bad row; reading continues with the next line
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
