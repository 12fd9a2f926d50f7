//! Quotes of text tables: cells that never end, and the separator of the first line.

/// State within a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Before the first byte of a cell.
    #[default]
    Start,
    /// In a cell without quotes.
    Bare,
    /// Inside quotes.
    Quoted,
    /// Behind a quote inside quotes: the end of the cell, or one half of a doubled quote.
    Closed,
}

/// Follows the quotes of a table.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Quotes {
    state: State,
    /// Line of the last opening quote.
    pub opened: usize,
    /// Whether text stands behind a closing quote.
    pub stray: bool,
}

impl Quotes {
    /// Reads a part of line `line`.
    pub fn read(&mut self, part: &[u8], delimiter: u8, line: usize) {
        for b in part {
            self.state = match (self.state, b) {
                (State::Start, b'"') => {
                    self.opened = line;
                    State::Quoted
                }
                (State::Quoted, b'"') => State::Closed,
                (State::Closed, b'"') | (State::Quoted, _) => State::Quoted,
                (_, b'\r' | b'\n') => State::Start,
                (_, b) if *b == delimiter => State::Start,
                (State::Closed, b' ') => State::Closed,
                (State::Closed, _) => {
                    self.stray = true;
                    State::Bare
                }
                (State::Start | State::Bare, _) => State::Bare,
            };
        }
    }

    /// Whether a quote is open.
    pub fn is_open(&self) -> bool {
        self.state == State::Quoted
    }
}

/// The separator that a line of Excel's before the names gives: `sep=;`.
pub(super) fn given_separator(first: &[u8]) -> Option<u8> {
    let start = first.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(first);
    match start.strip_prefix(b"sep=")? {
        [separator, b'\n'] | [separator, b'\r', b'\n'] => Some(*separator),
        _ => None,
    }
}

/// The separator of a table: the most frequent one outside of quotes in the first line, and `usual` if there is none.
pub(super) fn separator(first: &[u8], usual: u8) -> u8 {
    let mut quoted = false;
    let outside: Vec<u8> = first
        .iter()
        .filter(|b| {
            quoted ^= **b == b'"';
            !quoted
        })
        .copied()
        .collect();
    let count = |c: &u8| outside.iter().filter(|b| *b == c).count();
    let all = [b'|', b'\t', b';', b',', usual];
    all.into_iter().filter(|c| count(c) > 0).max_by_key(count).unwrap_or(usual)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_separator_stands_outside_of_quotes() {
        for (first, found) in [
            ("question,answer", b','),
            ("question;answer", b';'),
            ("question\tanswer", b'\t'),
            ("a|b|c", b'|'),
            ("\"a;b\",c", b','),
            ("a;b,c;d", b';'),
            ("text", b','),
        ] {
            assert_eq!(separator(first.as_bytes(), b','), found, "{first}");
        }
        assert_eq!(separator(b"text", b'\t'), b'\t');
    }

    #[test]
    fn open_and_stray_quotes_are_found() {
        let of = |text: &str| {
            let mut q = Quotes::default();
            text.split_inclusive('\n').enumerate().for_each(|(i, line)| q.read(line.as_bytes(), b',', i + 1));
            (q.is_open(), q.opened, q.stray)
        };
        assert_eq!(of("a,\"b\"\n\"c \"\"d\"\"\",e\"f\n"), (false, 2, false));
        assert_eq!(of("a,b\nc,\"d\ne,f\n"), (true, 2, false));
        assert_eq!(of("a,b\nc,\"d\ne,\"f\"\n"), (false, 2, true));
        assert_eq!(of("\"a\" ,\"b\"\r\n"), (false, 1, false));
    }
}
