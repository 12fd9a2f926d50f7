//! Bytes by name.

/// Bytes by name.
pub type NamedBytes = Vec<(&'static str, u64)>;

/// Sum of named bytes.
pub fn sum(parts: &[(&'static str, u64)]) -> u64 {
    parts.iter().map(|(_, b)| b).sum()
}
