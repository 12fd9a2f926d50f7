//! Files in other encodings, read as UTF-8.

use encoding_rs::{Decoder, DecoderResult, Encoding, UTF_8};
use std::io::{self, BufRead, Read};

/// Encoding of a file with its first bytes: by a byte order mark, else the given one. `None` for UTF-8.
pub(super) fn of(start: &[u8], given: Option<&'static Encoding>) -> Option<&'static Encoding> {
    let marked = Encoding::for_bom(start).map(|(encoding, _)| encoding);
    marked.or(given).filter(|encoding| *encoding != UTF_8)
}

/// Decodes a file.
pub(super) struct Decoded {
    inner: Box<dyn BufRead>,
    decoder: Decoder,
    text: io::Cursor<Vec<u8>>,
    /// Whether the decoder has seen the end of the file.
    ended: bool,
}

impl Decoded {
    pub fn new(inner: Box<dyn BufRead>, encoding: &'static Encoding) -> Self {
        let decoder = encoding.new_decoder_with_bom_removal();
        Self { inner, decoder, text: io::Cursor::default(), ended: false }
    }

    /// Decodes the next bytes.
    fn decode(&mut self) -> io::Result<String> {
        let name = self.decoder.encoding().name();
        let bytes = self.inner.fill_buf()?;
        let room = self.decoder.max_utf8_buffer_length_without_replacement(bytes.len());
        let mut text = String::with_capacity(room.unwrap_or(bytes.len()));
        let last = bytes.is_empty();
        let (result, read) = self.decoder.decode_to_string_without_replacement(bytes, &mut text, last);
        self.inner.consume(read);
        match result {
            DecoderResult::Malformed(..) => {
                let why = format!("not {name}: bytes that stand for no character");
                Err(io::Error::new(io::ErrorKind::InvalidData, why))
            }
            DecoderResult::InputEmpty => {
                self.ended = last;
                Ok(text)
            }
            DecoderResult::OutputFull => Ok(text),
        }
    }
}

impl Read for Decoded {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = self.text.read(buffer)?;
            if read > 0 || buffer.is_empty() || self.ended {
                return Ok(read);
            }
            self.text = io::Cursor::new(self.decode()?.into_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use encoding_rs::{UTF_16BE, UTF_16LE, WINDOWS_1252};
    use std::io::BufReader;

    fn read(bytes: &[u8], given: Option<&'static Encoding>) -> io::Result<String> {
        let mut text = String::new();
        let small = Box::new(BufReader::with_capacity(7, io::Cursor::new(bytes.to_vec())));
        match of(bytes, given) {
            Some(encoding) => Decoded::new(small, encoding).read_to_string(&mut text)?,
            None => io::Cursor::new(bytes).read_to_string(&mut text)?,
        };
        Ok(text)
    }

    #[test]
    fn byte_order_marks_decide_and_characters_cross_buffers() -> anyhow::Result<()> {
        let text = "ab\u{1F600}é\n".repeat(99);
        for (encoding, mark) in [(UTF_16LE, [0xFF, 0xFE]), (UTF_16BE, [0xFE, 0xFF])] {
            let each = |u: u16| if encoding == UTF_16LE { u.to_le_bytes() } else { u.to_be_bytes() };
            let units: Vec<u8> = text.encode_utf16().flat_map(each).collect();
            let marked = [&mark[..], &units].concat();
            assert_eq!(read(&marked, None)?, text);
            assert_eq!(read(&marked, Some(WINDOWS_1252))?, text);
            assert_eq!(read(&units, Some(encoding))?, text, "without a mark");
            assert!(read(&marked[..marked.len() - 1], None).is_err());
        }
        assert_eq!(read(b"Caf\xe9 \x80\n", Some(WINDOWS_1252))?, "Café €\n");
        assert_eq!(read("é".as_bytes(), Some(UTF_8))?, "é");
        Ok(())
    }
}
