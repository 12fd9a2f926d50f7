//! Sizes of the pages of a Parquet file, from their headers, before any page is decompressed. A small file may
//! hold pages of gigabytes, which the library unpacks at once.

use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::ParquetMetaData;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Largest page or dictionary, unpacked, in bytes.
pub(super) const LARGEST: u64 = 256 << 20;
/// Bytes read for a header, and for one with long statistics.
const HEADER: [u64; 2] = [1 << 12, 4 << 20];
/// Deepest nesting of structs in a header.
const DEPTH: usize = 16;

/// Most values of a list column in a row, on average over a row group. A few bytes may hold any number of equal
/// values, and each takes memory.
pub(super) const MOST_VALUES: i64 = 1 << 20;

/// Checks that no page of a file unpacks to more than `most` bytes, and no row of a row group holds more than
/// `values` values of a column on average.
///
/// # Errors
/// A larger page or row, by column; headers that do not follow one another.
pub(super) fn check(file: &File, about: &ParquetMetaData, most: u64, values: i64) -> Result<()> {
    for group in about.row_groups() {
        for column in group.columns() {
            let mean = column.num_values() / group.num_rows().max(1);
            if mean > values {
                return Err(ParquetError::General(format!(
                    "a row has {mean} values of column {}, more than {values}; split it into several",
                    column.column_path().string(),
                )));
            }
            let (mut at, length) = column.byte_range();
            let end = at.saturating_add(length);
            while at < end {
                let header = header(file, at, end)?;
                if header.unpacked > most {
                    return Err(ParquetError::General(format!(
                        "a page of column {} unpacks to {} MiB, more than {} MiB; write it with smaller pages",
                        column.column_path().string(),
                        header.unpacked >> 20,
                        most >> 20
                    )));
                }
                at = at.saturating_add(header.bytes).saturating_add(header.packed);
            }
        }
    }
    Ok(())
}

/// Sizes of a page, in bytes.
#[derive(Debug, PartialEq, Eq)]
struct Header {
    /// The header itself.
    bytes: u64,
    unpacked: u64,
    packed: u64,
}

fn header(file: &File, at: u64, end: u64) -> Result<Header> {
    for most in HEADER {
        let mut bytes = vec![0; most.min(end - at) as usize];
        file.read_exact_at(&mut bytes, at)?;
        if let Some(header) = parsed(&bytes) {
            return Ok(header);
        }
    }
    Err(ParquetError::General(format!("no page begins at byte {at}")))
}

/// Parses a `PageHeader`: field 2 is the unpacked size, field 3 the packed one.
fn parsed(bytes: &[u8]) -> Option<Header> {
    let mut reader = Compact(bytes);
    let mut sizes = [None; 2];
    reader.fields(0, &mut |field, value| {
        if let (2 | 3, Some(n)) = (field, value) {
            sizes[field as usize - 2] = u64::try_from(n).ok();
        }
    })?;
    Some(Header { bytes: (bytes.len() - reader.0.len()) as u64, unpacked: sizes[0]?, packed: sizes[1]? })
}

/// Reads values of Thrift's compact protocol.
struct Compact<'a>(&'a [u8]);

impl Compact<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn pass(&mut self, bytes: u64) -> Option<()> {
        self.0 = self.0.get(usize::try_from(bytes).ok()?..)?;
        Some(())
    }

    fn varint(&mut self) -> Option<u64> {
        let mut out = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            out |= u64::from(byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return Some(out);
            }
        }
        None
    }

    fn integer(&mut self) -> Option<i64> {
        let n = self.varint()?;
        Some((n >> 1) as i64 ^ -((n & 1) as i64))
    }

    /// Reads a struct, and shows its integer fields.
    fn fields(&mut self, depth: usize, seen: &mut dyn FnMut(i64, Option<i64>)) -> Option<()> {
        let mut field = 0i64;
        loop {
            let head = self.byte()?;
            let (delta, kind) = (head >> 4, head & 15);
            if kind == 0 {
                return Some(());
            }
            field = if delta == 0 { self.integer()? } else { field.wrapping_add(i64::from(delta)) };
            let value = if (4..=6).contains(&kind) { Some(self.integer()?) } else { None };
            // booleans are in the head
            if value.is_none() && kind > 2 {
                self.value(kind, depth)?;
            }
            seen(field, value);
        }
    }

    /// Passes a value.
    fn value(&mut self, kind: u8, depth: usize) -> Option<()> {
        match kind {
            1..=3 => self.pass(1),
            4..=6 => self.integer().map(|_| ()),
            7 => self.pass(8),
            8 => {
                let length = self.varint()?;
                self.pass(length)
            }
            9 | 10 => {
                let head = self.byte()?;
                let count = if head >> 4 == 15 { self.varint()? } else { u64::from(head >> 4) };
                (0..count).try_for_each(|_| self.value(head & 15, depth))
            }
            12 if depth < DEPTH => self.fields(depth + 1, &mut |_, _| ()),
            // headers hold no maps
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::file::metadata::ParquetMetaDataReader;

    #[test]
    fn pages_of_real_files_are_found_and_bounded() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tables");
        let mut files = 0;
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|e| e != "parquet") {
                continue;
            }
            let file = File::open(&path).unwrap();
            let about = ParquetMetaDataReader::new().parse_and_finish(&file).unwrap();
            check(&file, &about, LARGEST, MOST_VALUES).unwrap();
            let told = check(&file, &about, 1, MOST_VALUES).unwrap_err().to_string();
            assert!(told.contains("a page of column"), "{told}");
            let told = check(&file, &about, LARGEST, 0).unwrap_err().to_string();
            assert!(told.contains("values of column"), "{told}");
            files += 1;
        }
        assert!(files > 0);
    }

    #[test]
    fn headers_are_read_to_their_end() {
        // type 0; unpacked 300; packed 20; a data page header of one value; the end
        let bytes = [0x15, 0, 0x15, 0xD8, 0x04, 0x15, 0x28, 0x2C, 0x15, 0x02, 0x00, 0x00, 0xFF];
        assert_eq!(parsed(&bytes), Some(Header { bytes: 12, unpacked: 300, packed: 20 }));
        for cut in 0..12 {
            assert_eq!(parsed(&bytes[..cut]), None, "{cut}");
        }
        assert_eq!(parsed(&[0x1C; 99]), None);
    }
}
