//! Tokenized samples: their tokens and an index, both in files, or in memory where there are none.
//!
//! A source's samples are two strings of bytes. The one has the tokens end to end, four bytes each: the id, with its
//! highest bit set where the token is its own label. A sample whose labels are others has its ids and then its labels.
//! The other has a [`Record`] of each sample. Both are read by place, so that what is in memory grows neither with the
//! tokens nor with the samples, and any order of the samples costs the same.

use super::bytes::{Bytes, FEW, List, Scratch, Window, cannot};
use super::encode::{Example, UNSUPERVISED};
use super::error::Error;
use super::record::{ENTRY, Entry, MARK, Packed, RECORD, Record, small};
use super::rows::Item;
use ft_base::store::Pending;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Records that are read at once.
const AT_ONCE: usize = 1 << 14;
/// Samples that are looked for among others at a time.
const LOOKED_FOR: usize = 1 << 18;

/// The samples of one source.
#[derive(Debug, Default)]
pub(super) struct Store {
    tokens: Bytes,
    records: Bytes,
    len: usize,
    /// Bytes that the tokens take.
    bytes: u64,
    /// BLAKE3 of the tokens.
    pub hash: String,
}

impl Store {
    /// Of files that hold `count` records, and the tokens that have this hash. Few records are held in memory.
    ///
    /// # Errors
    /// Files that cannot be read, and records that are not of tokens end to end; `seen` gets all bytes of the records.
    pub fn open(
        (tokens, tokens_at): (File, PathBuf),
        (records, records_at): (File, PathBuf),
        len: usize,
        hash: String,
        seen: &mut dyn FnMut(&[u8]),
    ) -> Result<Self, Error> {
        let size = (len * RECORD) as u64;
        let records = Bytes::file(records, records_at.clone(), size);
        let (mut held, mut bytes) = (Vec::new(), 0);
        let mut keep = |part: &[u8]| {
            seen(part);
            if len * RECORD <= FEW {
                held.extend_from_slice(part);
            }
        };
        each_record(&records, len, &mut keep, &mut |_, r| {
            if r.entry.at != bytes {
                return Err(cannot(&records_at, io::ErrorKind::InvalidData.into()));
            }
            bytes += r.entry.bytes();
            Ok(())
        })?;
        let records = if held.is_empty() { records } else { Bytes::Memory(held) };
        Ok(Self { tokens: Bytes::file(tokens, tokens_at, bytes), records, len, bytes, hash })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes that the tokens take.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn example(&self, number: usize, source: usize) -> Result<Example, Error> {
        let mut record = [0; RECORD];
        self.records.read((number * RECORD) as u64, &mut record)?;
        let Record { entry, line, .. } = Record::of(&record);
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
        Ok(Example { ids, labels, source, line: line as usize })
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
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ft_base::store::Error> {
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
    pub fn commit_as(self, path: &Path) -> Result<(), ft_base::store::Error> {
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
        let entry = Entry { at: self.bytes, ..sample.record.entry };
        self.parts.0.extend(&sample.tokens);
        self.parts.1.extend(Record { entry, ..sample.record }.to_bytes());
        self.bytes += sample.tokens.len() as u64;
        self.count += 1;
    }

    /// Writes what was pushed.
    ///
    /// # Errors
    /// Files that cannot be written.
    pub fn flush(&mut self) -> Result<(), ft_base::store::Error> {
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
        let of = |sink: Sink, len: u64| match sink.to {
            To::Memory(mut bytes) => {
                bytes.shrink_to_fit();
                Bytes::Memory(bytes)
            }
            To::File(file) => Bytes::file(file.unnamed(), PathBuf::from("the tokens of this command"), len),
        };
        let (len, bytes) = (self.count, self.bytes);
        let records = of(self.records, (len * RECORD) as u64);
        Ok(Store { tokens: of(self.tokens, bytes), records, len, bytes, hash })
    }
}

/// The samples of a source that are in a dataset.
#[derive(Clone, Debug)]
struct Part {
    store: Arc<Store>,
    /// How many samples of the dataset stand before them.
    first: usize,
    /// Their numbers in the store, ascending; all where there is no list.
    chosen: Option<List>,
}

impl Part {
    fn len(&self) -> usize {
        self.chosen.as_ref().map_or(self.store.len(), List::len)
    }

    fn number(&self, window: &mut Window, i: usize) -> Result<usize, Error> {
        self.chosen.as_ref().map_or(Ok(i), |c| Ok(c.at(window, i)? as usize))
    }
}

/// Tokenized samples, in the order of sources and files.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    parts: Vec<Part>,
}

impl Samples {
    /// Adds the samples of the next source.
    pub(super) fn push(&mut self, store: Arc<Store>, chosen: Option<List>) {
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

    /// The source of sample `i`, and which of its samples that is.
    fn within(&self, i: usize) -> Option<(usize, usize)> {
        let source = self.parts.partition_point(|p| p.first <= i).checked_sub(1)?;
        let part = &self.parts[source];
        (i - part.first < part.len()).then(|| (source, i - part.first))
    }

    /// Reads what the index says of samples.
    pub fn reader(&self) -> Reader<'_> {
        Reader { samples: self, windows: self.parts.iter().map(|_| Default::default()).collect() }
    }

    /// Sample `i`; `None` where it is not there.
    ///
    /// # Errors
    /// A file of tokens that cannot be read any more.
    pub fn get(&self, i: usize) -> Result<Option<Example>, Error> {
        let Some((source, i)) = self.within(i) else { return Ok(None) };
        let part = &self.parts[source];
        part.store.example(part.number(&mut Window::default(), i)?, source).map(Some)
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
            let chosen = p.chosen.as_ref().map_or(0, List::resident);
            chosen + p.store.tokens.resident() + p.store.records.resident()
        };
        self.parts.iter().map(of).sum()
    }

    /// What tells these samples from others, without a look at their tokens: of each source the hash of its tokens.
    pub(super) fn hashes(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|p| p.store.hash.as_str())
    }

    fn each_digest(&self, each: &mut dyn FnMut(usize, u64) -> Result<(), Error>) -> Result<(), Error> {
        for part in &self.parts {
            let (mut next, mut window) = (0, Window::default());
            each_record(&part.store.records, part.store.len(), &mut |_| {}, &mut |number, record| {
                if next < part.len() && part.number(&mut window, next)? == number {
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
        let (mut wanted, mut shared) = (Vec::new(), 0);
        other.each_digest(&mut |i, digest| {
            wanted.push((digest, small(i)));
            if wanted.len() == LOOKED_FOR {
                shared += self.hold(&mut wanted, other)?;
                wanted.clear();
            }
            Ok(())
        })?;
        Ok(shared + self.hold(&mut wanted, other)?)
    }

    /// How many of these samples of `other`, with their digests, have the ids of one of these.
    fn hold(&self, wanted: &mut [(u64, u32)], other: &Samples) -> Result<usize, Error> {
        if wanted.is_empty() {
            return Ok(0);
        }
        wanted.sort_unstable();
        let mut found = vec![false; wanted.len()];
        self.each_digest(&mut |i, digest| {
            let first = wanted.partition_point(|w| w.0 < digest);
            let same = wanted[first..].iter().take_while(|w| w.0 == digest).count();
            let left = (first..first + same).filter(|at| !found[*at]).collect::<Vec<_>>();
            if left.is_empty() {
                return Ok(());
            }
            let Some(ours) = self.get(i)? else { return Ok(()) };
            for at in left {
                found[at] = other.get(wanted[at].1 as usize)?.is_some_and(|e| e.ids == ours.ids);
            }
            Ok(())
        })?;
        Ok(found.into_iter().filter(|f| *f).count())
    }

    /// Takes samples out: what is left, and what was taken. `out` says of each source and the number of its samples there
    /// which go.
    ///
    /// # Errors
    /// Lists that cannot be read any more.
    pub(super) fn split(
        self,
        scratch: &Scratch,
        out: &dyn Fn(usize, usize) -> Box<dyn Fn(usize) -> bool>,
    ) -> Result<(Self, Self), Error> {
        let (mut kept, mut taken) = (Self::default(), Self::default());
        for (source, part) in self.parts.into_iter().enumerate() {
            let out = out(source, part.len());
            let (mut lists, mut window) = ((scratch.list(), scratch.list()), Window::default());
            for i in 0..part.len() {
                let list = if out(i) { &mut lists.1 } else { &mut lists.0 };
                list.push(small(part.number(&mut window, i)?))?;
            }
            kept.push(part.store.clone(), Some(lists.0.finish()?));
            taken.push(part.store, Some(lists.1.finish()?));
        }
        Ok((kept, taken))
    }
}

/// Reads what the index says of samples; of those that follow one another a part at a time.
pub struct Reader<'a> {
    samples: &'a Samples,
    /// Of each source: its list, and its records.
    windows: Vec<(Window, Window)>,
}

impl Reader<'_> {
    /// The source of sample `i`, and the sample's number there.
    ///
    /// # Errors
    /// As [`Samples::get`].
    pub(super) fn place(&mut self, i: usize) -> Result<(usize, usize), Error> {
        let Some((source, i)) = self.samples.within(i) else { return Ok((usize::MAX, usize::MAX)) };
        Ok((source, self.samples.parts[source].number(&mut self.windows[source].0, i)?))
    }

    /// Sample `i`, without its tokens; none of them where it is not there.
    ///
    /// # Errors
    /// As [`Samples::get`].
    pub fn item(&mut self, i: usize) -> Result<Item, Error> {
        let (source, number) = self.place(i)?;
        let Some(part) = self.samples.parts.get(source) else { return Ok(Item::default()) };
        let at = (number * RECORD) as u64;
        let entry = Entry::of(&self.windows[source].1.read::<ENTRY>(&part.store.records, at)?);
        Ok(Item { sample: small(i), tokens: small(entry.tokens()), targets: entry.targets })
    }
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
            let mut reader = samples.reader();
            for (i, e) in examples.iter().enumerate() {
                let item = reader.item(i).unwrap();
                prop_assert_eq!((item.tokens as usize, item.targets as usize), (e.ids.len(), e.targets()));
            }
            prop_assert!(samples.get(examples.len()).unwrap().is_none());
            // split in two: each is in one of them, in order
            let (even, odd) = samples.clone().split(&Scratch::default(), &|_, _| Box::new(|i| i % 2 == 1)).unwrap();
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
