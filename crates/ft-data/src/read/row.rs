//! Unparsed rows.

use ft_base::store::json;
use serde_json::Value;

/// Largest row in bytes; books have several million.
pub(super) const LONGEST_ROW: usize = 32 << 20;
/// Largest number of JSON values in a row; a value takes up to a hundred bytes of memory.
const VALUES: usize = 8 << 20;

/// An unparsed row, as JSON text for every file type.
pub(crate) struct RawRow {
    /// First line of the row, from 1; the row number in files without lines.
    pub line: usize,
    /// First column of the row, in bytes from 1.
    pub column: usize,
    /// The JSON text, or the reason for a missing row.
    pub bytes: Result<Vec<u8>, String>,
}

/// A parse error.
pub(crate) struct ParseError {
    pub line: usize,
    /// In bytes, from 1.
    pub column: usize,
    pub message: String,
}

impl RawRow {
    /// Parses the row.
    pub fn parse(&self) -> Result<Value, ParseError> {
        let fail =
            |line: usize, column: usize, message: String| ParseError { line, column: column.max(1), message };
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
            return Err(fail(
                self.line + lines,
                column,
                "not UTF-8; encoding, beside source, names another one".into(),
            ));
        }
        json::value(bytes).map_err(|e| {
            let text = json::describe(&e, "not JSON");
            let message = text.rsplit_once(" at line ").map_or(text.as_str(), |t| t.0);
            let column = if e.line() <= 1 { self.column - 1 + e.column() } else { e.column() };
            fail(self.line + e.line().saturating_sub(1), column, message.into())
        })
    }
}

pub(crate) fn too_long() -> String {
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
