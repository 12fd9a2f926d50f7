//! Rows of a file with a single JSON array. The reader splits at commas between items while streaming and
//! parses items one by one: a bad item does not affect its neighbors, and only one item is in memory.

use super::row::{LONGEST_ROW, RawRow, too_long};
use crate::error::Error;
use std::io::{self, BufRead};
use std::path::PathBuf;

const BOM: [u8; 3] = *b"\xEF\xBB\xBF";
const UNCLOSED: &str = "the file ends before the array's closing bracket";

/// Items of an array.
pub(crate) struct Array {
    file: Box<dyn BufRead>,
    path: PathBuf,
    /// Position of the next byte, counted from 1; columns in bytes.
    line: usize,
    column: usize,
    state: State,
}

#[derive(PartialEq)]
enum State {
    Before,
    Inside,
    Done,
}

/// The delimiter after an item.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Comma,
    Bracket,
    /// End of file.
    File,
}

impl Array {
    pub fn new(file: Box<dyn BufRead>, path: PathBuf) -> Self {
        Self { file, path, line: 1, column: 1, state: State::Before }
    }

    /// Returns the next item. A structural error of the array or a read error ends the iteration.
    pub fn next(&mut self) -> Result<Option<RawRow>, Error> {
        let next = match self.state {
            State::Done => Ok(None),
            State::Before => self.first(),
            State::Inside => self.item().map(Some),
        };
        next.map_err(|e| {
            self.state = State::Done;
            Error::read(&self.path, e)
        })
    }

    /// Skips to the array, and returns the first item.
    fn first(&mut self) -> io::Result<Option<RawRow>> {
        if self.peek()? == Some(BOM[0]) {
            for byte in BOM {
                if self.peek()? == Some(byte) {
                    self.step(1)?;
                }
            }
        }
        match self.skip_space()? {
            None => {
                self.state = State::Done;
                return Ok(None);
            }
            Some(b'[') => self.step(1)?,
            Some(_) => {
                let why = "expected an array of rows, or lines of one object each";
                return Ok(Some(self.broken(why)));
            }
        }
        self.state = State::Inside;
        match self.skip_space()? {
            Some(b']') => self.close(),
            _ => self.item().map(Some),
        }
    }

    fn item(&mut self) -> io::Result<RawRow> {
        self.skip_space()?;
        let (line, column) = (self.line, self.column);
        let (bytes, end) = self.cut()?;
        let whole = RawRow { line, column, bytes };
        match end {
            End::Comma => self.step(1)?,
            End::Bracket => return Ok(self.close()?.unwrap_or(whole)),
            End::File => {
                self.state = State::Done;
                let empty = matches!(&whole.bytes, Ok(b) if b.trim_ascii().is_empty());
                if empty {
                    let why = "the file ends where a row should begin".to_string();
                    return Ok(RawRow { bytes: Err(why), ..whole });
                }
                // A complete value without the closing bracket would parse, but the file is truncated.
                if whole.parse().is_ok() {
                    return Ok(self.broken(UNCLOSED));
                }
            }
        }
        Ok(whole)
    }

    /// Reads up to the comma or bracket after an item. Discards the bytes of an item that is too long.
    fn cut(&mut self) -> io::Result<(Result<Vec<u8>, String>, End)> {
        let (mut depth, mut quoted, mut escaped) = (0usize, false, false);
        let mut item = Ok(Vec::new());
        loop {
            let buffer = self.file.fill_buf()?;
            if buffer.is_empty() {
                return Ok((item, End::File));
            }
            let ends = |b: &u8| {
                match (quoted, b) {
                    _ if escaped => escaped = false,
                    (true, b'\\') => escaped = true,
                    (_, b'"') => quoted = !quoted,
                    (true, _) => {}
                    (_, b'{' | b'[') => depth += 1,
                    (_, b',' | b']') if depth == 0 => return true,
                    (_, b'}' | b']') => depth = depth.saturating_sub(1),
                    _ => {}
                }
                false
            };
            let at = buffer.iter().position(ends);
            let part = &buffer[..at.unwrap_or(buffer.len())];
            if item.as_ref().is_ok_and(|i: &Vec<u8>| i.len() + part.len() > LONGEST_ROW) {
                item = Err(too_long());
            }
            if let Ok(item) = &mut item {
                item.extend_from_slice(part);
            }
            let end = at.map(|at| if buffer[at] == b',' { End::Comma } else { End::Bracket });
            let read = part.len();
            self.step(read)?;
            if let Some(end) = end {
                return Ok((item, end));
            }
        }
    }

    /// Consumes the closing bracket; only white space may follow.
    fn close(&mut self) -> io::Result<Option<RawRow>> {
        self.step(1)?;
        let more = self.skip_space()?.is_some();
        self.state = State::Done;
        Ok(more.then(|| self.broken("text after the end of the array")))
    }

    fn broken(&mut self, why: &str) -> RawRow {
        self.state = State::Done;
        RawRow { line: self.line, column: self.column, bytes: Err(why.into()) }
    }

    fn peek(&mut self) -> io::Result<Option<u8>> {
        Ok(self.file.fill_buf()?.first().copied())
    }

    /// Skips white space, and returns the next byte.
    fn skip_space(&mut self) -> io::Result<Option<u8>> {
        loop {
            let buffer = self.file.fill_buf()?;
            let spaces = buffer.iter().take_while(|b| matches!(b, b' ' | b'\t' | b'\r' | b'\n')).count();
            let next = buffer.get(spaces).copied();
            if spaces == 0 {
                return Ok(next);
            }
            self.step(spaces)?;
            if next.is_some() {
                return Ok(next);
            }
        }
    }

    /// Consumes buffered bytes, and updates line and column.
    fn step(&mut self, bytes: usize) -> io::Result<()> {
        let part = &self.file.fill_buf()?[..bytes];
        self.line += part.iter().filter(|b| **b == b'\n').count();
        self.column = match part.iter().rposition(|b| *b == b'\n') {
            Some(at) => bytes - at,
            None => self.column + bytes,
        };
        self.file.consume(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::prop;
    use std::io::{BufReader, Cursor};

    type Rows = Vec<(usize, usize, Result<Vec<u8>, String>)>;

    /// The rows of a file, read with a limited buffer size.
    fn rows(bytes: &[u8], at_a_time: usize) -> Rows {
        let file = BufReader::with_capacity(at_a_time, Cursor::new(bytes.to_vec()));
        let mut array = Array::new(Box::new(file), "a.json".into());
        std::iter::from_fn(|| array.next().transpose())
            .flatten()
            .map(|r| (r.line, r.column, r.bytes))
            .collect()
    }

    fn text(rows: &Rows) -> String {
        let each = rows.iter().map(|(line, column, bytes)| match bytes {
            Ok(b) => format!("{line}:{column} {}", String::from_utf8_lossy(b).replace('\n', "~")),
            Err(e) => format!("{line}:{column} ({e})"),
        });
        each.collect::<Vec<_>>().join(" | ")
    }

    #[test]
    fn items_are_cut_at_their_commas_and_stand_where_they_begin() {
        for (file, found) in [
            ("", ""),
            (" \n ", ""),
            ("[]", ""),
            ("\u{feff} [1]\n", "1:6 1"),
            ("[1,\n  {\"a\": [2, 3]} ,\n4]", "1:2 1 | 2:3 {\"a\": [2, 3]}  | 3:1 4"),
            (r#"["a,]\"\\", "[{"]"#, r#"1:2 "a,]\"\\" | 1:13 "[{""#),
            ("[1]\n x", "2:2 (text after the end of the array)"),
            ("[] ]", "1:4 (text after the end of the array)"),
            ("{}", "1:1 (expected an array of rows, or lines of one object each)"),
            ("[1, 2\n", "1:2 1 | 2:1 (the file ends before the array's closing bracket)"),
            ("[1, {\"a", "1:2 1 | 1:5 {\"a"),
            ("[1,\n", "1:2 1 | 2:1 (the file ends where a row should begin)"),
            ("[1,,2]", "1:2 1 | 1:4  | 1:5 2"),
        ] {
            assert_eq!(text(&rows(file.as_bytes(), 64)), found, "{file:?}");
        }
    }

    #[test]
    fn a_row_that_is_too_long_is_told_and_left_out() {
        let long = [b"[1, \"".to_vec(), vec![b'a'; LONGEST_ROW], b"\", 2]".to_vec()].concat();
        let found = rows(&long, 1 << 16);
        assert_eq!(text(&found), format!("1:2 1 | 1:5 ({}) | 1:{} 2", too_long(), LONGEST_ROW + 9));
    }

    proptest::proptest! {
        /// The buffer size has no effect on the rows.
        #[test]
        fn pieces_of_any_size_make_the_same_rows(
            pieces in prop::collection::vec(prop::sample::select(vec!["[", "]", "{", "}", ",", "\"", "\\", "\n", " ", "a", "é"]), 0..60),
            closed: bool,
            at_a_time in 1usize..9,
        ) {
            let inner = pieces.concat();
            let file = if closed { format!("[{inner}]") } else { inner };
            proptest::prop_assert_eq!(rows(file.as_bytes(), at_a_time), rows(file.as_bytes(), 1 << 12));
        }
    }
}
