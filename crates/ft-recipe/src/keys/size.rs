//! Sizes in bytes with units.

use crate::syntax::quote;

/// Size units, largest first, with factors.
pub(crate) const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("kB", 1_000),
    ("B", 1),
];

/// Smallest size accepted without a unit. A smaller number was probably meant in another unit.
pub(crate) const SMALLEST_BARE: u64 = 1 << 20;

/// Formats a size in the largest binary unit that divides it.
pub(crate) fn format_bytes(bytes: u64) -> String {
    let mut binary = UNITS.iter().filter(|(unit, _)| unit.contains('i'));
    let (unit, size) = binary.find(|(_, size)| bytes.is_multiple_of(*size)).unwrap_or(&("B", 1));
    quote(&format!("{}{unit}", bytes / size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_exactly() {
        for (bytes, text) in [
            (48 << 30, "48GiB"),
            (1536 << 20, "1536MiB"),
            (1 << 40, "1TiB"),
            (80_000_000_001, "80000000001B"),
        ] {
            assert_eq!(format_bytes(bytes), quote(text));
        }
    }
}
