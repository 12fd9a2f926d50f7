//! Rows of JSON Lines files.

use super::row::{LONGEST_ROW, RawRow, too_long};
use crate::error::Error;
use ft_base::error::Location;
use std::io::{BufRead, Read};
use std::path::PathBuf;

/// Most blank lines in a row: more are no data, and slow to skip.
const BLANK: usize = 1_000_000;

/// Rows of a JSON Lines file; blank lines are skipped.
pub(crate) struct Lines {
    file: Box<dyn BufRead>,
    path: PathBuf,
    line: usize,
}

impl Lines {
    pub fn new(file: Box<dyn BufRead>, path: PathBuf) -> Self {
        Self { file, path, line: 0 }
    }

    /// Returns the next non-blank line.
    pub fn next(&mut self) -> Result<Option<RawRow>, Error> {
        let (mut bytes, first) = (Vec::new(), self.line);
        loop {
            bytes.clear();
            if self.line - first > BLANK {
                let place = Location { file: self.path.display().to_string(), line: first + 1, column: 0 };
                return Err(Error::File { place, message: format!("{BLANK} empty lines, and no row") });
            }
            let most = LONGEST_ROW as u64 + 2;
            let read = (&mut self.file).take(most).read_until(b'\n', &mut bytes);
            read.map_err(|e| Error::read(&self.path, e))?;
            if bytes.is_empty() {
                return Ok(None);
            }
            self.line += 1;
            if bytes.len() as u64 == most && bytes.last() != Some(&b'\n') {
                // reported and dropped like any bad row; reading continues with the next line
                self.file.skip_until(b'\n').map_err(|e| Error::read(&self.path, e))?;
                return Ok(Some(RawRow { line: self.line, column: 1, bytes: Err(too_long()) }));
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
                return Ok(Some(RawRow { line: self.line, column, bytes: Ok(bytes) }));
            }
        }
    }
}
