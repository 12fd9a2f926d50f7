//! Values of each row in Parquet's list columns, counted by their repetition levels before a value is decoded. A few
//! bytes may hold any number of equal values, and each takes memory.

use parquet::basic::Encoding;
use parquet::column::page::Page;
use parquet::errors::{ParquetError, Result};
use parquet::file::reader::RowGroupReader;

/// Most values of a list column in a row.
pub(super) const MOST_VALUES: u64 = 1 << 20;

/// Checks that no row of a row group has more than `most` values of a column.
///
/// # Errors
/// A larger row, by column; levels that are damaged.
pub(super) fn check(group: &dyn RowGroupReader, most: u64) -> Result<()> {
    for (i, column) in group.metadata().columns().iter().enumerate() {
        let deepest = column.column_descr().max_rep_level().unsigned_abs();
        if deepest == 0 || u64::try_from(column.num_values()).is_ok_and(|n| n <= most) {
            continue;
        }
        let name = column.column_path().string();
        let fail = |why: String| Err(ParquetError::General(why));
        let mut row = Row { values: 0, most, width: u16::BITS - deepest.leading_zeros() };
        for page in group.get_column_page_reader(i)? {
            let page = page?;
            if matches!(page, Page::DictionaryPage { .. }) {
                continue;
            }
            match levels(&page).and_then(|levels| row.read(levels, page.num_values())) {
                Some(true) => {}
                Some(false) => {
                    return fail(format!(
                        "a row has more than {most} values of column {name}; split it into several"
                    ));
                }
                None => return fail(format!("the repetition levels of column {name} are damaged")),
            }
        }
    }
    Ok(())
}

/// The repetition levels of a page.
fn levels(page: &Page) -> Option<&[u8]> {
    match page {
        Page::DataPage { buf, rep_level_encoding: Encoding::RLE, .. } => {
            let (length, rest) = buf.split_first_chunk()?;
            rest.get(..u32::from_le_bytes(*length) as usize)
        }
        Page::DataPageV2 { buf, rep_levels_byte_len, .. } => buf.get(..*rep_levels_byte_len as usize),
        _ => None,
    }
}

/// The row that is read.
struct Row {
    /// Its values so far.
    values: u64,
    most: u64,
    /// Bits of a level.
    width: u32,
}

impl Row {
    /// Reads `left` levels, in runs of equal ones and bit-packed groups of eight. Whether no row is too large;
    /// `None` if levels are missing.
    fn read(&mut self, mut bytes: &[u8], left: u32) -> Option<bool> {
        let (width, mut left) = (self.width.into(), u64::from(left));
        while left > 0 {
            let head = varint(&mut bytes)?;
            let (packed, n) = (head & 1 == 1, head >> 1);
            let size = if packed { n.checked_mul(width)? } else { width.div_ceil(8) };
            let (run, rest) = bytes.split_at_checked(usize::try_from(size).ok()?)?;
            bytes = rest;
            let count = if packed { n.checked_mul(8)? } else { n }.min(left);
            left = left.checked_sub(count).filter(|_| count > 0)?;
            let fits = match packed {
                true => (0..count).all(|i| self.add(is_zero(run, i * width, width), 1)),
                false => self.add(is_zero(run, 0, width), count),
            };
            if !fits {
                return Some(false);
            }
        }
        Some(true)
    }

    /// Adds `count` values. `begin`: every value starts a row; otherwise none does.
    fn add(&mut self, begin: bool, count: u64) -> bool {
        self.values = if begin { 1 } else { self.values.saturating_add(count) };
        self.values <= self.most
    }
}

/// Whether `width` bits from bit `at` are zero.
fn is_zero(bytes: &[u8], at: u64, width: u64) -> bool {
    (at..at + width).all(|bit| bytes[(bit / 8) as usize] >> (bit % 8) & 1 == 0)
}

/// Takes an integer of 7 bits a byte, the lowest first.
pub(super) fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut out = 0u64;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        out |= u64::from(first & 0x7F) << shift;
        if first & 0x80 == 0 {
            return Some(out);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::file::reader::{FileReader, SerializedFileReader};

    /// Rows of 1 value, and one of 300 that goes over pages (`tests/fixtures/make_tables.py`).
    #[test]
    fn the_largest_row_is_found() {
        for version in ["1", "2"] {
            let name = format!("../../tests/fixtures/saved/uneven.v{version}.parquet");
            let file =
                std::fs::File::open(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap();
            let reader = SerializedFileReader::new(file).unwrap();
            let group = reader.get_row_group(0).unwrap();
            assert!(group.get_column_page_reader(0).unwrap().count() > 4, "{version}");
            check(&*group, 300).unwrap();
            let told = check(&*group, 299).unwrap_err().to_string();
            assert!(told.contains("a row has more than 299 values of column ids.list.element"), "{told}");
        }
    }

    #[test]
    fn runs_and_groups_are_counted() {
        let read = |most, bytes: &[u8], left| Row { values: 0, most, width: 1 }.read(bytes, left);
        // a run of 1 zero and one of 9 ones; a group of 0 1 1 1 0 1 1 1
        let runs = [2, 0, 18, 1];
        assert_eq!(
            (read(10, &runs, 10), read(9, &runs, 10), read(9, &runs, 9)),
            (Some(true), Some(false), Some(true))
        );
        let group = [3, 0b1110_1110];
        assert_eq!(
            (read(4, &group, 8), read(3, &group, 8), read(3, &group, 3)),
            (Some(true), Some(false), Some(true))
        );
        for cut in [&[][..], &[2], &[3], &[0, 0], &[0xFF; 12]] {
            assert_eq!(read(9, cut, 1), None, "{cut:?}");
        }
    }
}
