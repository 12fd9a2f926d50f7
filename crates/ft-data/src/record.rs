//! A sample as it is written: its tokens, and what the index says of it.

use super::encode::{Example, UNSUPERVISED};
use std::ops::Range;

/// The bit of a token that is its own label, and of the length of a sample with labels of its own.
pub(super) const MARK: u32 = 1 << 31;
/// What is written of a sample beside its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) entry: Entry,
    /// Its line in its file.
    pub(super) line: u64,
    /// Half of a hash of its ids: samples with another one differ.
    pub(super) digest: u64,
}

/// Where a sample's tokens stand: the beginning of its [`Record`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    /// Their first byte.
    pub(super) at: u64,
    /// How many; [`MARK`] is set where the labels stand behind the ids.
    pub(super) len: u32,
    pub(super) targets: u32,
}

/// Bytes of a [`Record`].
pub(super) const RECORD: usize = 32;
/// Bytes of an [`Entry`].
pub(super) const ENTRY: usize = 16;

/// A number of up to eight bytes.
fn number(bytes: &[u8], range: Range<usize>) -> u64 {
    let word = bytes.get(range).unwrap_or_default();
    word.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b))
}

impl Record {
    pub fn to_bytes(self) -> [u8; RECORD] {
        let mut out = [0; RECORD];
        out[..8].copy_from_slice(&self.entry.at.to_le_bytes());
        out[8..12].copy_from_slice(&self.entry.len.to_le_bytes());
        out[12..16].copy_from_slice(&self.entry.targets.to_le_bytes());
        out[16..24].copy_from_slice(&self.line.to_le_bytes());
        out[24..].copy_from_slice(&self.digest.to_le_bytes());
        out
    }

    pub fn of(bytes: &[u8]) -> Self {
        Self { entry: Entry::of(bytes), line: number(bytes, 16..24), digest: number(bytes, 24..32) }
    }
}

impl Entry {
    pub fn of(bytes: &[u8]) -> Self {
        let half = |range| number(bytes, range) as u32;
        Self { at: number(bytes, 0..8), len: half(8..12), targets: half(12..16) }
    }

    pub fn tokens(self) -> usize {
        (self.len & !MARK) as usize
    }

    pub fn bytes(self) -> u64 {
        let tokens = 4 * u64::from(self.len & !MARK);
        if self.len & MARK == 0 { tokens } else { 2 * tokens }
    }
}

/// A sample as it is written, wherever its tokens will stand.
pub(super) struct Packed {
    pub(super) tokens: Vec<u8>,
    pub(super) record: Record,
}

impl Packed {
    pub fn of(e: &Example) -> Self {
        let supervised = |l: i32| l != UNSUPERVISED;
        let plain = |(id, l): (&u32, &i32)| *id < MARK && (!supervised(*l) || *l as u32 == *id);
        let own = !e.ids.iter().zip(&e.labels).all(plain);
        let mut tokens = Vec::with_capacity(e.ids.len() * if own { 8 } else { 4 });
        if own {
            tokens.extend(e.ids.iter().flat_map(|i| i.to_le_bytes()));
            tokens.extend(e.labels.iter().flat_map(|l| l.to_le_bytes()));
        } else {
            let word = |(id, l): (&u32, &i32)| if supervised(*l) { id | MARK } else { *id };
            tokens.extend(e.ids.iter().zip(&e.labels).flat_map(|both| word(both).to_le_bytes()));
        }
        let mut hasher = blake3::Hasher::new();
        e.ids.iter().for_each(|i| {
            hasher.update(&i.to_le_bytes());
        });
        let digest = hasher.finalize().as_bytes()[..8].iter().fold(0u64, |n, b| n << 8 | u64::from(*b));
        let len = small(e.ids.len()).min(MARK - 1) | if own { MARK } else { 0 };
        let entry = Entry { at: 0, len, targets: small(e.targets()) };
        let record = Record { entry, line: e.line as u64, digest };
        Self { tokens, record }
    }
}

pub(super) fn small(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
