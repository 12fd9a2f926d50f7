//! Tokenized samples: an index in memory, 16 bytes a sample, and the tokens in a file, or in memory where there is none.
//!
//! A source's samples are two strings of bytes. The one has the tokens end to end, four bytes each: the id, with its
//! highest bit set where the token is its own label. A sample whose labels are others has its ids and then its labels.
//! The other has a [`Record`] of each sample. Both are read by place, so that what is in memory does not grow with the
//! tokens, and any order of the samples costs the same.

use super::encode::{Example, UNSUPERVISED};
use super::error::Error;
use super::record::{Entry, MARK, Packed, RECORD, Record, small};
use crate::store::Pending;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Records that are read at once.
const AT_ONCE: usize = 1 << 15;

/// Where bytes are.
#[derive(Debug)]
enum Bytes {
    Memory(Vec<u8>),
    File(File, PathBuf),
}

impl Default for Bytes {
    fn default() -> Self {
        Bytes::Memory(Vec::new())
    }
}

impl Bytes {
    fn read(&self, at: u64, buffer: &mut [u8]) -> Result<(), Error> {
        match self {
            Bytes::Memory(bytes) => {
                let start = usize::try_from(at).unwrap_or(usize::MAX);
                let found = start.checked_add(buffer.len()).and_then(|end| bytes.get(start..end));
                buffer.copy_from_slice(found.unwrap_or_default());
                Ok(())
            }
            Bytes::File(file, path) => file.read_exact_at(buffer, at).map_err(|cause| cannot(path, cause)),
        }
    }

    fn resident(&self) -> u64 {
        match self {
            Bytes::Memory(bytes) => bytes.len() as u64,
            Bytes::File(..) => 0,
        }
    }
}

/// The samples of one source.
#[derive(Debug, Default)]
pub(super) struct Store {
    tokens: Bytes,
    records: Bytes,
    entries: Vec<Entry>,
    /// BLAKE3 of the tokens.
    pub hash: String,
}

impl Store {
    /// Of files that hold `count` records, and the tokens that have this hash.
    ///
    /// # Errors
    /// Files that cannot be read; `seen` gets all bytes of the records.
    pub fn open(
        (tokens, tokens_at): (File, PathBuf),
        (records, records_at): (File, PathBuf),
        count: usize,
        hash: String,
        seen: &mut dyn FnMut(&[u8]),
    ) -> Result<Self, Error> {
        let (tokens, records) = (Bytes::File(tokens, tokens_at), Bytes::File(records, records_at));
        Self::new(tokens, records, count, hash, seen)
    }

    fn new(
        tokens: Bytes,
        records: Bytes,
        count: usize,
        hash: String,
        seen: &mut dyn FnMut(&[u8]),
    ) -> Result<Self, Error> {
        let mut entries = Vec::with_capacity(count);
        let mut at = 0;
        each_record(&records, count, seen, &mut |_, r| {
            let entry = Entry { at, len: r.len, targets: r.targets };
            at += entry.bytes();
            entries.push(entry);
            Ok(())
        })?;
        Ok(Self { tokens, records, entries, hash })
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Bytes that the tokens take.
    pub fn bytes(&self) -> u64 {
        self.entries.last().map_or(0, |e| e.at + e.bytes())
    }

    fn example(&self, number: usize, source: usize) -> Result<Example, Error> {
        let Some(entry) = self.entries.get(number) else {
            return Ok(Example { ids: Vec::new(), labels: Vec::new(), source, line: 0 });
        };
        let mut bytes = vec![0; entry.bytes() as usize];
        self.tokens.read(entry.at, &mut bytes)?;
        let words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let (ids, labels) = if entry.len & MARK == 0 {
            let label = |w: u32| if w & MARK == 0 { UNSUPERVISED } else { (w & !MARK) as i32 };
            words.map(|w| (w & !MARK, label(w))).unzip()
        } else {
            let n = entry.tokens();
            (words.clone().take(n).collect(), words.skip(n).map(|w| w as i32).collect())
        };
        let mut record = [0; RECORD];
        self.records.read((number * RECORD) as u64, &mut record)?;
        Ok(Example { ids, labels, source, line: Record::of(&record).line as usize })
    }
}

/// Reads records in order, a bounded part at a time.
fn each_record(
    records: &Bytes,
    count: usize,
    seen: &mut dyn FnMut(&[u8]),
    each: &mut dyn FnMut(usize, Record) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut buffer = vec![0; RECORD * AT_ONCE.min(count)];
    for start in (0..count).step_by(AT_ONCE) {
        let part = &mut buffer[..RECORD * AT_ONCE.min(count - start)];
        records.read((start * RECORD) as u64, part)?;
        seen(part);
        for (i, record) in part.chunks_exact(RECORD).enumerate() {
            each(start + i, Record::of(record))?;
        }
    }
    Ok(())
}

/// Where a [`Store`] is written to: bytes and their hash.
pub(super) struct Sink {
    hasher: blake3::Hasher,
    to: To,
}

enum To {
    Memory(Vec<u8>),
    File(Pending),
}

impl Sink {
    fn new(to: To) -> Self {
        Self { hasher: blake3::Hasher::new(), to }
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), crate::store::Error> {
        self.hasher.update(bytes);
        match &mut self.to {
            To::Memory(all) => all.extend(bytes),
            To::File(file) => file.write(bytes)?,
        }
        Ok(())
    }

    /// The hash of what was written.
    pub fn hash(&self) -> blake3::Hash {
        self.hasher.finalize()
    }

    /// Makes a file whole, under this name in its folder; memory is.
    pub fn commit_as(self, path: &Path) -> Result<(), crate::store::Error> {
        match self.to {
            To::Memory(_) => Ok(()),
            To::File(file) => file.commit_as(path),
        }
    }
}

/// A store that is being written.
pub(super) struct Writer {
    pub tokens: Sink,
    pub records: Sink,
    pub count: usize,
    /// Bytes of the tokens.
    pub bytes: u64,
    parts: (Vec<u8>, Vec<u8>),
}

impl Writer {
    fn new(tokens: To, records: To) -> Self {
        let (tokens, records) = (Sink::new(tokens), Sink::new(records));
        Self { tokens, records, count: 0, bytes: 0, parts: Default::default() }
    }

    /// In memory.
    pub fn memory() -> Self {
        Self::new(To::Memory(Vec::new()), To::Memory(Vec::new()))
    }

    /// To files.
    pub fn files(tokens: Pending, records: Pending) -> Self {
        Self::new(To::File(tokens), To::File(records))
    }

    pub fn push(&mut self, sample: &Packed) {
        self.parts.0.extend(&sample.tokens);
        self.parts.1.extend(sample.record.to_bytes());
        self.bytes += sample.tokens.len() as u64;
        self.count += 1;
    }

    /// Writes what was pushed.
    ///
    /// # Errors
    /// Files that cannot be written.
    pub fn flush(&mut self) -> Result<(), crate::store::Error> {
        let (tokens, records) = &mut self.parts;
        self.tokens.write(tokens)?;
        self.records.write(records)?;
        tokens.clear();
        records.clear();
        Ok(())
    }

    /// What was written, without a name.
    ///
    /// # Errors
    /// Files that cannot be written or read.
    pub fn finish(mut self) -> Result<Store, Error> {
        self.flush()?;
        let hash = self.tokens.hash().to_hex().to_string();
        let bytes = |sink: Sink| match sink.to {
            To::Memory(mut bytes) => {
                bytes.shrink_to_fit();
                Bytes::Memory(bytes)
            }
            To::File(pending) => Bytes::File(pending.unnamed(), PathBuf::from("the tokens of this command")),
        };
        Store::new(bytes(self.tokens), bytes(self.records), self.count, hash, &mut |_| {})
    }
}

/// The samples of a source that are in a dataset.
#[derive(Clone, Debug)]
struct Part {
    store: Arc<Store>,
    /// How many samples of the dataset stand before them.
    first: usize,
    /// Their numbers in the store, ascending; all where there is no list.
    chosen: Option<Vec<u32>>,
}

impl Part {
    fn len(&self) -> usize {
        self.chosen.as_ref().map_or(self.store.len(), Vec::len)
    }

    fn number(&self, i: usize) -> usize {
        self.chosen.as_ref().map_or(i, |c| c.get(i).map_or(usize::MAX, |n| *n as usize))
    }
}

/// Tokenized samples, in the order of sources and files.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    parts: Vec<Part>,
}

impl Samples {
    /// Adds the samples of the next source.
    pub(super) fn push(&mut self, store: Arc<Store>, chosen: Option<Vec<u32>>) {
        self.parts.push(Part { store, first: self.len(), chosen });
    }

    /// Samples in memory.
    pub fn of(examples: &[Example]) -> Result<Self, Error> {
        let mut out = Self::default();
        for source in 0..examples.iter().map(|e| e.source + 1).max().unwrap_or(0) {
            let mut writer = Writer::memory();
            examples.iter().filter(|e| e.source == source).for_each(|e| writer.push(&Packed::of(e)));
            out.push(Arc::new(writer.finish()?), None);
        }
        Ok(out)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.parts.last().map_or(0, |p| p.first + p.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The numbers that the samples of each source have.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        self.parts.iter().map(|p| p.first..p.first + p.len()).collect()
    }

    /// The source of sample `i`, and the sample's number there.
    fn place(&self, i: usize) -> Option<(usize, usize)> {
        let source = self.parts.partition_point(|p| p.first <= i).checked_sub(1)?;
        let part = &self.parts[source];
        (i - part.first < part.len()).then(|| (source, part.number(i - part.first)))
    }

    fn entry(&self, i: usize) -> Option<Entry> {
        let (source, number) = self.place(i)?;
        self.parts[source].store.entries.get(number).copied()
    }

    /// Tokens of sample `i`; 0 where it is not there.
    pub fn tokens(&self, i: usize) -> usize {
        self.entry(i).map_or(0, Entry::tokens)
    }

    /// Supervised targets of sample `i`; 0 where it is not there.
    pub fn targets(&self, i: usize) -> usize {
        self.entry(i).map_or(0, |e| e.targets as usize)
    }

    /// Sample `i`; `None` where it is not there.
    ///
    /// # Errors
    /// A file of tokens that cannot be read any more.
    pub fn get(&self, i: usize) -> Result<Option<Example>, Error> {
        let Some((source, number)) = self.place(i) else { return Ok(None) };
        self.parts[source].store.example(number, source).map(Some)
    }

    /// All samples, which are then in memory.
    ///
    /// # Errors
    /// As [`Samples::get`].
    pub fn all(&self) -> Result<Vec<Example>, Error> {
        (0..self.len()).filter_map(|i| self.get(i).transpose()).collect()
    }

    /// Bytes that they take in memory.
    pub fn resident(&self) -> u64 {
        let of = |p: &Part| {
            let index = size_of::<Entry>() * p.store.len() + 4 * p.chosen.as_ref().map_or(0, Vec::len);
            index as u64 + p.store.tokens.resident() + p.store.records.resident()
        };
        self.parts.iter().map(of).sum()
    }

    /// What tells these samples from others, without a look at their tokens: of each source the hash of its tokens.
    pub(super) fn hashes(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|p| p.store.hash.as_str())
    }

    /// What sample `i` is among those of [`Samples::hashes`]: source, number, tokens.
    pub(super) fn identity(&self, i: usize) -> [u32; 3] {
        let (source, number) = self.place(i).unwrap_or((usize::MAX, usize::MAX));
        [small(source), small(number), small(self.tokens(i))]
    }

    fn each_digest(&self, each: &mut dyn FnMut(usize, u64) -> Result<(), Error>) -> Result<(), Error> {
        for part in &self.parts {
            let mut next = 0;
            each_record(&part.store.records, part.store.len(), &mut |_| {}, &mut |number, record| {
                if next < part.len() && part.number(next) == number {
                    next += 1;
                    each(part.first + next - 1, record.digest)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// How many samples of `other` have the ids of one of these.
    ///
    /// # Errors
    /// As [`Samples::get`].
    pub fn shared_with(&self, other: &Samples) -> Result<usize, Error> {
        let mut wanted: HashMap<u64, Vec<usize>> = HashMap::new();
        other.each_digest(&mut |i, digest| {
            wanted.entry(digest).or_default().push(i);
            Ok(())
        })?;
        let mut shared = 0;
        self.each_digest(&mut |i, digest| {
            let Some(theirs) = wanted.get_mut(&digest) else { return Ok(()) };
            let Some(ours) = self.get(i)? else { return Ok(()) };
            let mut left = Vec::new();
            for j in theirs.drain(..) {
                match other.get(j)? {
                    Some(e) if e.ids == ours.ids => shared += 1,
                    _ => left.push(j),
                }
            }
            if left.is_empty() {
                wanted.remove(&digest);
            } else {
                *theirs = left;
            }
            Ok(())
        })?;
        Ok(shared)
    }

    /// Takes the samples out that `out` says, by source and number there: what is left, and what was taken.
    pub(super) fn split(self, out: &dyn Fn(usize, usize) -> Vec<bool>) -> (Self, Self) {
        let (mut kept, mut taken) = (Self::default(), Self::default());
        for (source, part) in self.parts.into_iter().enumerate() {
            let out = out(source, part.len());
            let numbers = |which: bool| {
                let those = out.iter().enumerate().filter(move |(_, out)| **out == which);
                Some(those.map(|(i, _)| small(part.number(i))).collect())
            };
            kept.push(part.store.clone(), numbers(false));
            taken.push(part.store.clone(), numbers(true));
        }
        (kept, taken)
    }
}

fn cannot(path: &Path, cause: io::Error) -> Error {
    Error::Read { path: path.into(), cause }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// What was put in comes out: labels that are the ids, none, others; and ids of 32 bits.
        #[test]
        fn samples_come_back(
            rows in prop::collection::vec(
                (prop::collection::vec((any::<u32>(), 0..4u8), 1..20), 0usize..3, any::<u16>()), 0..30),
        ) {
            let label = |id: u32, kind: u8| match kind {
                0 => UNSUPERVISED,
                1 => 7,
                _ => i32::try_from(id).unwrap_or(i32::MAX),
            };
            let mut examples: Vec<Example> = rows.iter().map(|(tokens, source, line)| Example {
                ids: tokens.iter().map(|t| t.0).collect(),
                labels: tokens.iter().map(|(id, kind)| label(*id, *kind)).collect(),
                source: *source,
                line: usize::from(*line),
            }).collect();
            examples.sort_by_key(|e| e.source);
            let samples = Samples::of(&examples).unwrap();
            prop_assert_eq!(samples.all().unwrap(), examples.clone());
            for (i, e) in examples.iter().enumerate() {
                prop_assert_eq!((samples.tokens(i), samples.targets(i)), (e.ids.len(), e.targets()));
            }
            prop_assert!(samples.get(examples.len()).unwrap().is_none());
            // split in two: each is in one of them, in order
            let (even, odd) = samples.clone().split(&|_, n| (0..n).map(|i| i % 2 == 1).collect());
            let mut both = [even.all().unwrap(), odd.all().unwrap()].concat();
            both.sort_by_key(|e| e.source);
            prop_assert_eq!(both.len(), examples.len());
            // what is in both, by the ids alone
            let ours: std::collections::HashSet<_> = even.all().unwrap().into_iter().map(|e| e.ids).collect();
            let shared = odd.all().unwrap().iter().filter(|e| ours.contains(&e.ids)).count();
            prop_assert_eq!(even.shared_with(&odd).unwrap(), shared);
            prop_assert_eq!(samples.shared_with(&even).unwrap(), even.len());
        }
    }
}
