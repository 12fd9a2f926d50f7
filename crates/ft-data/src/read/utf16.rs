//! UTF-16 files, as spreadsheets write them, read as UTF-8.

use std::io::{self, BufRead, Read};

/// Units decoded at a time.
const UNITS: usize = 1 << 15;

/// Byte order of the units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Little,
    Big,
}

/// The byte order by the mark at the start of a file; `None` for other encodings.
pub(super) fn order(start: &[u8]) -> Option<Order> {
    match start {
        [0xFF, 0xFE, ..] => Some(Order::Little),
        [0xFE, 0xFF, ..] => Some(Order::Big),
        _ => None,
    }
}

/// Decodes UTF-16 after its byte order mark.
pub(super) struct Utf16 {
    inner: Box<dyn BufRead>,
    order: Order,
    /// First half of a surrogate pair.
    high: Option<u16>,
    text: io::Cursor<Vec<u8>>,
}

impl Utf16 {
    /// A reader of the text behind the mark.
    pub fn new(mut inner: Box<dyn BufRead>, order: Order) -> io::Result<Self> {
        inner.read_exact(&mut [0; 2])?;
        Ok(Self { inner, order, high: None, text: io::Cursor::default() })
    }

    /// Decodes the next units; an empty text at the end of the file.
    fn decode(&mut self) -> io::Result<String> {
        let bad = |why: &str| io::Error::new(io::ErrorKind::InvalidData, format!("not UTF-16: {why}"));
        let mut bytes = Vec::new();
        (&mut self.inner).take(2 * UNITS as u64).read_to_end(&mut bytes)?;
        let (pairs, rest) = bytes.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(bad("an odd number of bytes"));
        }
        let unit = |pair: &[u8; 2]| match self.order {
            Order::Little => u16::from_le_bytes(*pair),
            Order::Big => u16::from_be_bytes(*pair),
        };
        let mut units: Vec<u16> = self.high.take().into_iter().chain(pairs.iter().map(unit)).collect();
        if pairs.len() == UNITS && units.last().is_some_and(|u| (0xD800..0xDC00).contains(u)) {
            self.high = units.pop();
        }
        String::from_utf16(&units).map_err(|_| bad("half a surrogate pair"))
    }
}

impl Read for Utf16 {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.text.read(buffer)?;
        if read > 0 || buffer.is_empty() {
            return Ok(read);
        }
        self.text = io::Cursor::new(self.decode()?.into_bytes());
        self.text.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_orders_are_read_across_the_edges_of_buffers() {
        let text = "ab\u{1F600}é\n".repeat(UNITS / 3);
        for shift in ["", "x"] {
            let text = format!("{shift}{text}");
            for (order, mark) in [(Order::Little, [0xFF, 0xFE]), (Order::Big, [0xFE, 0xFF])] {
                let each = |u: u16| if order == Order::Little { u.to_le_bytes() } else { u.to_be_bytes() };
                let bytes: Vec<u8> = mark.into_iter().chain(text.encode_utf16().flat_map(each)).collect();
                assert_eq!(super::order(&bytes), Some(order));
                let mut read = String::new();
                let inner = Box::new(io::Cursor::new(bytes.clone()));
                Utf16::new(inner, order).unwrap().read_to_string(&mut read).unwrap();
                assert!(read == text, "{order:?}");
                let cut = Box::new(io::Cursor::new(bytes[..bytes.len() - 1].to_vec()));
                assert!(Utf16::new(cut, order).unwrap().read_to_string(&mut read).is_err());
            }
        }
    }
}
