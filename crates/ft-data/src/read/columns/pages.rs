//! Sizes of the pages of a Parquet file, from their headers, before any page is decompressed. A small file may
//! hold pages of gigabytes, which the library unpacks at once.

use super::levels;
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::ParquetMetaData;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Largest page or dictionary, unpacked, in bytes.
pub(super) const LARGEST: u64 = 256 << 20;
/// Largest pages and dictionaries of all columns together. Reading a row holds one of each per column.
pub(super) const LARGEST_ROW: u64 = 4 << 30;
/// Bytes read for a header, and for one with long statistics.
const HEADER: [u64; 2] = [1 << 12, 4 << 20];
/// Deepest nesting of structs and lists in a header or a footer.
const DEPTH: usize = 16;

/// Checks that no page of a file unpacks to more than `most` bytes, the largest pages and dictionaries of all columns
/// together to no more than `most_row`, and pages hold no more values than their column.
///
/// # Errors
/// A larger page, by column; columns with larger pages together; more values; headers that do not follow one another.
pub(super) fn check(file: &File, about: &ParquetMetaData, most: u64, most_row: u64) -> Result<()> {
    for group in about.row_groups() {
        let mut row = 0u64;
        for column in group.columns() {
            let (mut values, mut dictionary, mut page) = (0u64, 0, 0);
            let (mut at, length) = column.byte_range();
            let end = at.saturating_add(length);
            while at < end {
                let header = header(file, at, end)?;
                if header.unpacked > most {
                    return Err(ParquetError::General(format!(
                        "a page of column {} unpacks to {} MiB, more than {} MiB; write the file with smaller pages",
                        column.column_path().string(),
                        header.unpacked >> 20,
                        most >> 20
                    )));
                }
                let largest = if header.values == 0 { &mut dictionary } else { &mut page };
                *largest = header.unpacked.max(*largest);
                at = at.saturating_add(header.bytes).saturating_add(header.packed);
                values = values.saturating_add(header.values);
            }
            if u64::try_from(column.num_values()).is_ok_and(|most| values > most) {
                return Err(ParquetError::General(format!(
                    "the pages of column {} hold {values} values, more than its {}",
                    column.column_path().string(),
                    column.num_values()
                )));
            }
            row = row.saturating_add(page).saturating_add(dictionary);
        }
        if row > most_row {
            return Err(ParquetError::General(format!(
                "pages of the {} columns unpack to {} MiB together, more than {} MiB; write smaller pages",
                group.num_columns(),
                row >> 20,
                most_row >> 20
            )));
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
    /// Values of a data page.
    values: u64,
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

/// Parses a `PageHeader`: field 2 is the unpacked size, field 3 the packed one; fields 5 and 8 are headers of data
/// pages, of which field 1 is the number of values.
fn parsed(bytes: &[u8]) -> Option<Header> {
    let mut reader = Compact(bytes);
    let (mut sizes, mut values) = ([None; 2], 0);
    reader.fields(0, 0, &mut |path, value| match (path, u64::try_from(value)) {
        ((0, field @ (2 | 3)), n) => sizes[field as usize - 2] = n.ok(),
        ((5 | 8, 1), Ok(n)) => values = n,
        _ => {}
    })?;
    Some(Header {
        bytes: (bytes.len() - reader.0.len()) as u64,
        unpacked: sizes[0]?,
        packed: sizes[1]?,
        values,
    })
}

/// Reads values of Thrift's compact protocol.
pub(super) struct Compact<'a>(pub &'a [u8]);

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
        levels::varint(&mut self.0)
    }

    fn integer(&mut self) -> Option<i64> {
        let n = self.varint()?;
        Some((n >> 1) as i64 ^ -((n & 1) as i64))
    }

    /// Reads the head of a field, and sets its number. Returns the kind, 0 at the end of a struct.
    pub fn head(&mut self, field: &mut i64) -> Option<u8> {
        let head = self.byte()?;
        let (delta, kind) = (head >> 4, head & 15);
        *field = match (kind, delta) {
            (0, _) => *field,
            (_, 0) => self.integer()?,
            _ => field.wrapping_add(i64::from(delta)),
        };
        Some(kind)
    }

    /// Reads the head of a list: kind and number of its items.
    pub fn list(&mut self) -> Option<(u8, u64)> {
        let head = self.byte()?;
        let count = if head >> 4 == 15 { self.varint()? } else { u64::from(head >> 4) };
        Some((head & 15, count))
    }

    /// Reads a struct, and shows its integer fields by `outer` and their number.
    pub fn fields(&mut self, outer: i64, depth: usize, seen: &mut dyn FnMut((i64, i64), i64)) -> Option<()> {
        let mut field = 0;
        loop {
            match self.head(&mut field)? {
                0 => return Some(()),
                // booleans are in the head
                1 | 2 => {}
                4..=6 => seen((outer, field), self.integer()?),
                12 if depth == 0 => self.fields(field, 1, seen)?,
                kind => self.value(kind, depth)?,
            }
        }
    }

    /// Passes a value.
    pub fn value(&mut self, kind: u8, depth: usize) -> Option<()> {
        match kind {
            1..=3 => self.pass(1),
            4..=6 => self.integer().map(|_| ()),
            7 => self.pass(8),
            8 => {
                let length = self.varint()?;
                self.pass(length)
            }
            9 | 10 if depth < DEPTH => {
                let (kind, count) = self.list()?;
                (0..count).try_for_each(|_| self.value(kind, depth + 1))
            }
            12 if depth < DEPTH => self.fields(0, depth + 1, &mut |_, _| ()),
            // headers and footers hold no maps
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
            check(&file, &about, LARGEST, LARGEST_ROW).unwrap();
            let told = check(&file, &about, 1, LARGEST_ROW).unwrap_err().to_string();
            assert!(told.contains("a page of column"), "{told}");
            let told = check(&file, &about, LARGEST, 1).unwrap_err().to_string();
            assert!(told.contains("together"), "{told}");
            files += 1;
        }
        assert!(files > 0);
    }

    #[test]
    fn page_headers_are_read_to_their_end() {
        // type 0; unpacked 300; packed 20; a data page header of one value; the end
        let bytes = [0x15, 0, 0x15, 0xD8, 0x04, 0x15, 0x28, 0x2C, 0x15, 0x02, 0x00, 0x00, 0xFF];
        assert_eq!(parsed(&bytes), Some(Header { bytes: 12, unpacked: 300, packed: 20, values: 1 }));
        for cut in 0..12 {
            assert_eq!(parsed(&bytes[..cut]), None, "{cut}");
        }
        for nested in [0x1C, 0x19] {
            assert_eq!(parsed(&vec![nested; 1 << 20]), None, "{nested}");
        }
    }
}
