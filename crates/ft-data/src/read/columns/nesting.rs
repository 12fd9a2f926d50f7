//! Nesting of a Parquet schema, from the footer, before the library reads it. The library descends one call a level,
//! and makes room for all children that a group counts.

use super::pages::Compact;
use parquet::errors::{ParquetError, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Most groups around a column, the schema itself included.
const DEEPEST: usize = 64;

/// Checks that no column is nested too deeply, and groups count no more children than the schema has.
///
/// # Errors
/// Deeper columns; a damaged footer.
pub(super) fn check(file: &File) -> Result<()> {
    let mut tail = [0; 8];
    // the library refuses files without a footer
    let Some(end) = file.metadata()?.len().checked_sub(tail.len() as u64) else { return Ok(()) };
    file.read_exact_at(&mut tail, end)?;
    let [a, b, c, d, b'P', b'A', b'R', b'1'] = tail else { return Ok(()) };
    let length = u32::from_le_bytes([a, b, c, d]);
    let Some(start) = end.checked_sub(length.into()) else { return Ok(()) };
    let mut footer = vec![0; length as usize];
    file.read_exact_at(&mut footer, start)?;
    let why = match depth(&footer) {
        Some(..=DEEPEST) => return Ok(()),
        Some(deeper) => format!("columns are nested {deeper} levels deep, more than {DEEPEST}; flatten them"),
        None => "the footer is damaged".into(),
    };
    Err(ParquetError::General(why))
}

/// Depth of the schema, field 2 of `FileMetaData`.
fn depth(footer: &[u8]) -> Option<usize> {
    let mut reader = Compact(footer);
    let (mut field, mut deepest) = (0, 0);
    loop {
        match (reader.head(&mut field)?, field) {
            (0, _) => return Some(deepest),
            (9, 2) => deepest = deepest.max(elements(&mut reader)?),
            (_, 2) => return None,
            // booleans are in the head
            (1 | 2, _) => {}
            (kind, _) => reader.value(kind, 0)?,
        }
    }
}

/// Depth of a list of schema elements, each followed by its children; field 5 of an element counts them.
fn elements(reader: &mut Compact<'_>) -> Option<usize> {
    let (_, count) = reader.list()?;
    // children to come, by level
    let mut open: Vec<u64> = Vec::new();
    let mut deepest = 0;
    for behind in (0..count).rev() {
        let mut children = Some(0);
        reader.fields(0, 1, &mut |(_, field), value| {
            if field == 5 {
                children = u64::try_from(value).ok();
            }
        })?;
        let children = children.filter(|n| *n <= behind)?;
        while open.last() == Some(&0) {
            open.pop();
        }
        if let Some(left) = open.last_mut() {
            *left -= 1;
        }
        if children > 0 {
            open.push(children);
            deepest = deepest.max(open.len());
        }
    }
    Some(deepest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::columns::Columns;
    use crate::shape::schema::Schema;
    use crate::tests::source;
    use ft_recipe::Format;

    /// Opens a file without rows: `groups` nested groups and a column, in a schema that counts `children`, written as
    /// Thrift does.
    fn open(groups: usize, children: &[u8]) -> Result<(), String> {
        let count = groups + 2;
        let mut footer = vec![0x15, 2, 0x19, 0xFC, count as u8 | 0x80, (count >> 7) as u8];
        footer.extend([&[0x48, 1, b'm', 0x15][..], children, &[0]].concat());
        footer.extend([0x35, 2, 0x18, 1, b'a', 0x15, 2, 0].repeat(groups));
        footer.extend([0x15, 12, 0x25, 2, 0x18, 1, b'x', 0]);
        footer.extend([0x16, 0, 0x19, 0x0C, 0]);
        let length = u32::try_from(footer.len()).unwrap().to_le_bytes();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.parquet");
        std::fs::write(&path, [&b"PAR1"[..], &footer, &length, b"PAR1"].concat()).unwrap();
        let schema = Schema::new(&source("a.parquet", Format::Text), None, false).unwrap();
        Columns::open(&path, &schema).map(|_| ()).map_err(|e| e.to_string())
    }

    #[test]
    fn schemas_of_any_depth_and_of_absent_children_are_refused() {
        let one = [2];
        for groups in [0, 9, DEEPEST - 1] {
            assert_eq!(open(groups, &one), Ok(()), "{groups}");
        }
        for groups in [DEEPEST, 1000, 10_000] {
            let told = open(groups, &one).unwrap_err();
            let want = format!("columns are nested {} levels deep, more than 64; flatten them", groups + 1);
            assert!(told.contains("a.parquet") && told.contains(&want), "{told}");
        }
        for children in [&[0xFE, 0xFF, 0xFF, 0xFF, 0x0F][..], &[4], &[1]] {
            let told = open(0, children).unwrap_err();
            assert!(told.contains("a.parquet") && told.contains("the footer is damaged"), "{told}");
        }
    }
}
