//! Binary layout of a sample: tokens and index record.

use crate::shape::example::{Content, Example, IGNORE_INDEX};

/// The highest bit of a word. In a token, it means supervised (label equals id); in a length, labels follow
/// the ids.
pub(super) const MARK: u32 = 1 << 31;
/// Index record of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Record {
    pub(crate) entry: Entry,
    /// Line in the data file.
    pub(crate) line: u64,
    /// First 64 bits of the hash of the ids; equal ids have equal digests.
    pub(crate) digest: u64,
}

/// Location of a sample's tokens: the first part of a [`Record`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Entry {
    /// Byte offset.
    pub(crate) at: u64,
    /// Number of tokens; [`MARK`] is set if labels follow the ids.
    pub(crate) len: u32,
    pub(crate) targets: u32,
    /// Tokens of the chosen document of a pair.
    pub(crate) chosen: u32,
    /// Flags: [`WEIGHTS`], [`SCORED`], [`CUT`], [`CONTINUED`], the content, and [`KEPT`].
    pub(crate) flags: u32,
    /// Sum of the weights of the targets.
    pub(crate) weight: f64,
}

/// Flag: weights follow ids and labels.
const WEIGHTS: u32 = 1;
/// Flag: a pair.
const PAIR: u32 = 2;
/// Flags of a rated completion.
const UNDESIRABLE: u32 = 4;
const DESIRABLE: u32 = 8;
/// Flag: scored documents.
const SCORED: u32 = 16;
/// Flag: cut to `data.max_length`, or the first piece of a divided document.
const CUT: u32 = 32;
/// Flag: a further piece of the document of the sample before it.
const CONTINUED: u32 = 64;

/// Values of a teacher for each target, in the flags from this bit on; they follow the weights.
const KEPT: u32 = 16;

/// Size of a [`Record`] in bytes.
pub(super) const RECORD: usize = 48;
/// Size of an [`Entry`] in bytes.
pub(super) const ENTRY: usize = 32;

impl Record {
    pub fn to_bytes(self) -> [u8; RECORD] {
        let Entry { at, len, targets, chosen, flags, weight } = self.entry;
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let entry = [at, pair(targets, len), pair(flags, chosen), weight.to_bits()];
        let words = entry.into_iter().chain([self.line, self.digest]);
        let mut out = [0; RECORD];
        out.as_chunks_mut().0.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_le_bytes());
        out
    }

    pub fn of(bytes: &[u8; RECORD]) -> Self {
        let [a, b, c, d, line, digest] = words::<6>(bytes);
        Self { entry: Entry::from_words([a, b, c, d]), line, digest }
    }
}

/// Little-endian integers.
fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let words = bytes.as_chunks().0;
    std::array::from_fn(|i| u64::from_le_bytes(words[i]))
}

impl Entry {
    pub fn of(bytes: &[u8; ENTRY]) -> Self {
        Self::from_words(words(bytes))
    }

    fn from_words([at, lengths, about, weight]: [u64; 4]) -> Self {
        let (len, targets) = (lengths as u32, (lengths >> 32) as u32);
        let (chosen, flags) = (about as u32, (about >> 32) as u32);
        Self { at, len, targets, chosen, flags, weight: f64::from_bits(weight) }
    }

    pub fn content(self) -> Content {
        match self.flags & ((1 << KEPT) - 1) & !(WEIGHTS | SCORED | CUT | CONTINUED) {
            PAIR => Content::Pair(self.chosen as usize),
            UNDESIRABLE => Content::Rated(false),
            DESIRABLE => Content::Rated(true),
            _ => Content::Document,
        }
    }

    pub fn has_weights(self) -> bool {
        self.flags & WEIGHTS != 0
    }

    /// Values of a teacher for each target.
    pub fn kept(self) -> u32 {
        self.flags >> KEPT
    }

    pub fn is_scored(self) -> bool {
        self.flags & SCORED != 0
    }

    pub fn is_cut(self) -> bool {
        self.flags & CUT != 0
    }

    pub fn is_continued(self) -> bool {
        self.flags & CONTINUED != 0
    }

    pub fn tokens(self) -> usize {
        (self.len & !MARK) as usize
    }

    pub fn bytes(self) -> u64 {
        let lists = 1 + u64::from(self.len & MARK != 0) + u64::from(self.has_weights());
        4 * lists * u64::from(self.len & !MARK) + 8 * u64::from(self.targets) * u64::from(self.kept())
    }
}

/// A sample, without tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Item {
    /// Sample number in the dataset.
    pub sample: u32,
    /// Length in tokens.
    pub tokens: u32,
    /// Number of targets.
    pub targets: u32,
    /// Tokens of the chosen document of a pair; 0 for one document.
    pub chosen: u32,
    /// Sum of the weights of the targets.
    pub weight: f64,
    /// Whether a weight may differ from 1.
    pub weighted: bool,
    /// Values of a teacher for each target; 0 without.
    pub kept: u32,
    /// Whether it is cut to `data.max_length`, or the first piece of a divided document.
    pub cut: bool,
    /// Whether it is a further piece of the document of the sample before it.
    pub continued: bool,
}

impl Item {
    /// Tokens of the documents, in order.
    pub fn documents(self) -> impl Iterator<Item = usize> {
        let (all, chosen) = (self.tokens as usize, self.chosen as usize);
        let first = if chosen == 0 { all } else { chosen };
        std::iter::once(first).chain((chosen > 0).then(|| all.saturating_sub(chosen)))
    }
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
        tokens.extend(e.weights.iter().flat_map(|w| w.to_le_bytes()));
        tokens.extend(e.teacher.ids.iter().flat_map(|i| i.to_le_bytes()));
        tokens.extend(e.teacher.logits.iter().flat_map(|x| x.to_le_bytes()));
        let mut hasher = blake3::Hasher::new();
        e.ids.iter().for_each(|i| {
            hasher.update(&i.to_le_bytes());
        });
        let digest = hasher.finalize().as_bytes()[..8].iter().fold(0u64, |n, b| n << 8 | u64::from(*b));
        let len = saturating_u32(e.ids.len()).min(MARK - 1) | if own { MARK } else { 0 };
        let (chosen, content) = match e.content {
            Content::Document => (0, 0),
            Content::Pair(chosen) => (saturating_u32(chosen), PAIR),
            Content::Rated(desirable) => (0, if desirable { DESIRABLE } else { UNDESIRABLE }),
        };
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        let flags = content | flag(!e.weights.is_empty(), WEIGHTS) | flag(e.scored, SCORED);
        let flags = flags | saturating_u32(e.teacher.kept) << KEPT;
        let targets = saturating_u32(e.targets());
        let entry = Entry { at: 0, len, targets, chosen, flags, weight: e.weight() };
        let record = Record { entry, line: e.line as u64, digest };
        Self { tokens, record }
    }

    /// The sample, marked if it is `cut` to `data.max_length`, or a further piece of a document.
    pub fn marked(mut self, cut: bool, continued: bool) -> Self {
        self.record.entry.flags |= if cut { CUT } else { 0 } | if continued { CONTINUED } else { 0 };
        self
    }
}

pub(crate) fn saturating_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
