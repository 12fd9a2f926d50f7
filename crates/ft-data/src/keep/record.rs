//! Binary layout of a sample: tokens and index record.

use crate::shape::example::{Example, IGNORE_INDEX};

/// The highest bit of a word. In a token, it means supervised (label equals id); in a length, labels follow
/// the ids.
pub(super) const MARK: u32 = 1 << 31;
/// Index record of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) entry: Entry,
    /// Line in the data file.
    pub(crate) line: u64,
    /// First 64 bits of the hash of the ids; equal ids have equal digests.
    pub(crate) digest: u64,
}

/// Location of a sample's tokens: the first part of a [`Record`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Byte offset.
    pub(crate) at: u64,
    /// Number of tokens; [`MARK`] is set if labels follow the ids.
    pub(crate) len: u32,
    pub(crate) targets: u32,
}

/// Size of a [`Record`] in bytes.
pub(super) const RECORD: usize = 32;
/// Size of an [`Entry`] in bytes.
pub(super) const ENTRY: usize = 16;

impl Record {
    pub fn to_bytes(self) -> [u8; RECORD] {
        let Entry { at, len, targets } = self.entry;
        let words = [at, u64::from(targets) << 32 | u64::from(len), self.line, self.digest];
        let mut out = [0; RECORD];
        out.as_chunks_mut().0.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_le_bytes());
        out
    }

    pub fn of(bytes: &[u8; RECORD]) -> Self {
        let [at, lengths, line, digest] = words::<4>(bytes);
        Self { entry: Entry::from_words(at, lengths), line, digest }
    }
}

/// Little-endian integers.
fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let words = bytes.as_chunks().0;
    std::array::from_fn(|i| u64::from_le_bytes(words[i]))
}

impl Entry {
    pub fn of(bytes: &[u8; ENTRY]) -> Self {
        let [at, lengths] = words::<2>(bytes);
        Self::from_words(at, lengths)
    }

    fn from_words(at: u64, lengths: u64) -> Self {
        Self { at, len: lengths as u32, targets: (lengths >> 32) as u32 }
    }

    pub fn tokens(self) -> usize {
        (self.len & !MARK) as usize
    }

    pub fn bytes(self) -> u64 {
        let tokens = 4 * u64::from(self.len & !MARK);
        if self.len & MARK == 0 { tokens } else { 2 * tokens }
    }
}

/// A sample, without tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Item {
    /// Sample number in the dataset.
    pub sample: u32,
    /// Length in tokens.
    pub tokens: u32,
    /// Number of targets.
    pub targets: u32,
}

/// A serialized sample with offset 0.
pub(crate) struct SerializedSample {
    pub(crate) tokens: Vec<u8>,
    pub(crate) record: Record,
}

impl SerializedSample {
    pub fn of(e: &Example) -> Self {
        let supervised = |l: i32| l != IGNORE_INDEX;
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
        let len = saturating_u32(e.ids.len()).min(MARK - 1) | if own { MARK } else { 0 };
        let entry = Entry { at: 0, len, targets: saturating_u32(e.targets()) };
        let record = Record { entry, line: e.line as u64, digest };
        Self { tokens, record }
    }
}

pub(crate) fn saturating_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
