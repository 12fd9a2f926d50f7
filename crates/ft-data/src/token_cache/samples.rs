//! Tokenized samples: a token file and an index file per source, or the same bytes in memory.
//!
//! The token file contains the tokens of all samples, four bytes per token: the id, with the highest bit set
//! if the token is supervised. For labels other than the ids, the file contains all ids of the sample, then
//! all labels. Weights other than 1 follow, as f32, then ids and values of a teacher for each target. The index file
//! contains one [`Record`] per sample. Both files are read by position: memory use grows neither with tokens nor with
//! samples, in any access order.

use super::bytes::{Bytes, List, SMALL, Scratch, Window};
use super::record::{ENTRY, Entry, Item, MARK, RECORD, Record, SerializedSample, saturating_u32};
use crate::error::Error;
use crate::shape::example::{Content, Example, IGNORE_INDEX, Teacher};
use ft_base::store::AtomicFile;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Records per read.
const AT_ONCE: usize = 1 << 14;
/// Samples per lookup batch in [`Samples::shared_with`].
const LOOKED_FOR: usize = 1 << 18;

/// The samples of one source.
#[derive(Debug, Default)]
pub(crate) struct TokenStore {
    tokens: Bytes,
    records: Bytes,
    len: usize,
    /// Size of the tokens, in bytes.
    pub bytes: u64,
    /// BLAKE3 hash of the tokens, in hexadecimal.
    pub hash: String,
}

impl TokenStore {
    /// Opens a token file with the given hash, and an index of `len` records. A small index is read into
    /// memory. `seen` receives all bytes of the index.
    ///
    /// # Errors
    /// Unreadable files, and records with gaps or overlaps.
    pub fn open(
        (tokens, tokens_at): (File, PathBuf),
        (records, records_at): (File, PathBuf),
        len: usize,
        hash: String,
        seen: &mut dyn FnMut(&[u8]),
    ) -> Result<Self, Error> {
        let size = (len * RECORD) as u64;
        let records = Bytes::File { file: records, path: records_at.clone(), len: size };
        let (mut held, mut bytes) = (Vec::new(), 0);
        let mut keep = |part: &[u8]| {
            seen(part);
            if len * RECORD <= SMALL {
                held.extend_from_slice(part);
            }
        };
        each_record(&records, len, &mut keep, &mut |_, r| {
            if r.entry.at != bytes {
                return Err(Error::read(&records_at, io::ErrorKind::InvalidData.into()));
            }
            bytes += r.entry.bytes();
            Ok(())
        })?;
        let records = if held.is_empty() { records } else { Bytes::Memory(held) };
        let tokens = Bytes::File { file: tokens, path: tokens_at, len: bytes };
        Ok(Self { tokens, records, len, bytes, hash })
    }

    fn example(&self, number: usize, source: usize) -> Result<Example, Error> {
        let mut record = [0; RECORD];
        self.records.read((number * RECORD) as u64, &mut record)?;
        let Record { entry, line, .. } = Record::of(&record);
        let mut bytes = vec![0; entry.bytes() as usize];
        self.tokens.read(entry.at, &mut bytes)?;
        let words = bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b));
        let n = entry.tokens();
        let (ids, labels): (Vec<u32>, Vec<i32>) = if entry.len & MARK == 0 {
            let label = |w: u32| if w & MARK == 0 { IGNORE_INDEX } else { (w & !MARK) as i32 };
            words.clone().take(n).map(|w| (w & !MARK, label(w))).unzip()
        } else {
            (words.clone().take(n).collect(), words.clone().skip(n).take(n).map(|w| w as i32).collect())
        };
        let mut rest = words.skip(if entry.len & MARK == 0 { n } else { 2 * n });
        let weighted = if entry.has_weights() { n } else { 0 };
        let weights = rest.by_ref().take(weighted).map(f32::from_bits).collect();
        let kept = entry.kept() as usize;
        let teacher_ids = rest.by_ref().take(kept * entry.targets as usize).collect();
        let teacher = Teacher { kept, ids: teacher_ids, logits: rest.map(f32::from_bits).collect() };
        let (content, scored) = (entry.content(), entry.is_scored());
        Ok(Example { ids, labels, weights, teacher, content, scored, source, line: line as usize })
    }
}

/// Reads records in order, in batches of bounded size.
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
        for (i, record) in part.as_chunks().0.iter().enumerate() {
            each(start + i, Record::of(record))?;
        }
    }
    Ok(())
}

/// Destination of the bytes of a [`TokenStore`], with a running hash.
pub(crate) struct HashedOutput {
    hasher: blake3::Hasher,
    to: Output,
}

enum Output {
    Memory(Vec<u8>),
    File(AtomicFile),
}

impl HashedOutput {
    fn new(to: Output) -> Self {
        Self { hasher: blake3::Hasher::new(), to }
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ft_base::store::Error> {
        self.hasher.update(bytes);
        match &mut self.to {
            Output::Memory(all) => all.extend(bytes),
            Output::File(file) => file.write(bytes)?,
        }
        Ok(())
    }

    /// The hash of all bytes written.
    pub fn hash(&self) -> blake3::Hash {
        self.hasher.finalize()
    }

    /// Renames a finished file to `path`; a no-op in memory.
    pub fn commit_as(self, path: &Path) -> Result<(), ft_base::store::Error> {
        match self.to {
            Output::Memory(_) => Ok(()),
            Output::File(file) => file.commit_as(path),
        }
    }
}

/// A store under construction.
pub(crate) struct StoreWriter {
    pub tokens: HashedOutput,
    pub records: HashedOutput,
    pub count: usize,
    /// Size of the tokens, in bytes.
    pub bytes: u64,
    parts: (Vec<u8>, Vec<u8>),
}

impl StoreWriter {
    fn new(tokens: Output, records: Output) -> Self {
        let (tokens, records) = (HashedOutput::new(tokens), HashedOutput::new(records));
        Self { tokens, records, count: 0, bytes: 0, parts: Default::default() }
    }

    /// Writes to memory.
    pub fn memory() -> Self {
        Self::new(Output::Memory(Vec::new()), Output::Memory(Vec::new()))
    }

    /// Writes to files.
    pub fn files(tokens: AtomicFile, records: AtomicFile) -> Self {
        Self::new(Output::File(tokens), Output::File(records))
    }

    pub fn push(&mut self, sample: &SerializedSample) {
        let entry = Entry { at: self.bytes, ..sample.record.entry };
        self.parts.0.extend(&sample.tokens);
        self.parts.1.extend(Record { entry, ..sample.record }.to_bytes());
        self.bytes += sample.tokens.len() as u64;
        self.count += 1;
    }

    /// Writes all pushed samples.
    pub fn flush(&mut self) -> Result<(), ft_base::store::Error> {
        let (tokens, records) = &mut self.parts;
        self.tokens.write(tokens)?;
        self.records.write(records)?;
        tokens.clear();
        records.clear();
        Ok(())
    }

    /// Finishes the store, leaving files unnamed.
    pub fn finish(mut self) -> Result<TokenStore, Error> {
        self.flush()?;
        let hash = self.tokens.hash().to_hex().to_string();
        let of = |sink: HashedOutput, len: u64| match sink.to {
            Output::Memory(mut bytes) => {
                bytes.shrink_to_fit();
                Bytes::Memory(bytes)
            }
            Output::File(file) => {
                Bytes::File { file: file.unnamed(), path: "the tokens of this command".into(), len }
            }
        };
        let (len, bytes) = (self.count, self.bytes);
        let records = of(self.records, (len * RECORD) as u64);
        Ok(TokenStore { tokens: of(self.tokens, bytes), records, len, bytes, hash })
    }
}

/// The samples of one source in a dataset.
#[derive(Clone, Debug)]
struct SourceSamples {
    store: Arc<TokenStore>,
    /// Number of samples of earlier sources.
    first: usize,
    /// Ascending sample numbers in the store; `None` selects all.
    chosen: Option<List>,
}

impl SourceSamples {
    fn len(&self) -> usize {
        self.chosen.as_ref().map_or(self.store.len, List::len)
    }

    fn number(&self, window: &mut Window, i: usize) -> Result<usize, Error> {
        self.chosen.as_ref().map_or(Ok(i), |c| Ok(c.at(window, i)? as usize))
    }
}

/// Tokenized samples, in the order of sources and files.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    parts: Vec<SourceSamples>,
}

impl Samples {
    /// Appends the samples of the next source.
    pub(crate) fn push(&mut self, store: Arc<TokenStore>, chosen: Option<List>) {
        self.parts.push(SourceSamples { store, first: self.len(), chosen });
    }

    /// Stores samples in memory.
    pub fn of(examples: &[Example]) -> Result<Self, Error> {
        let mut out = Self::default();
        for source in 0..examples.iter().map(|e| e.source + 1).max().unwrap_or(0) {
            let mut writer = StoreWriter::memory();
            examples
                .iter()
                .filter(|e| e.source == source)
                .for_each(|e| writer.push(&SerializedSample::of(e)));
            out.push(Arc::new(writer.finish()?), None);
        }
        Ok(out)
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.parts.last().map_or(0, |p| p.first + p.len())
    }

    /// Whether the dataset is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sample indices of every source.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        self.parts.iter().map(|p| p.first..p.first + p.len()).collect()
    }

    /// The source of sample `i`, and the position within the source.
    fn within(&self, i: usize) -> Option<(usize, usize)> {
        let source = self.parts.partition_point(|p| p.first <= i).checked_sub(1)?;
        let part = &self.parts[source];
        (i - part.first < part.len()).then(|| (source, i - part.first))
    }

    /// Returns a reader of the index.
    pub fn reader(&self) -> Reader<'_> {
        Reader { samples: self, windows: self.parts.iter().map(|_| Default::default()).collect() }
    }

    /// Returns sample `i`, or `None` if out of range.
    ///
    /// # Errors
    /// A token file that can no longer be read.
    pub fn get(&self, i: usize) -> Result<Option<Example>, Error> {
        let Some((source, i)) = self.within(i) else { return Ok(None) };
        let part = &self.parts[source];
        part.store.example(part.number(&mut Window::default(), i)?, source).map(Some)
    }

    /// Contents of sample `i`, or `None` if out of range.
    ///
    /// # Errors
    /// As [`Samples::get`].
    pub fn content(&self, i: usize) -> Result<Option<Content>, Error> {
        let Some((source, i)) = self.within(i) else { return Ok(None) };
        let part = &self.parts[source];
        let (number, mut entry) = (part.number(&mut Window::default(), i)?, [0; ENTRY]);
        part.store.records.read((number * RECORD) as u64, &mut entry)?;
        Ok(Some(Entry::of(&entry).content()))
    }

    /// Loads all samples into memory.
    ///
    /// # Errors
    /// As [`Samples::get`].
    pub fn all(&self) -> Result<Vec<Example>, Error> {
        (0..self.len()).filter_map(|i| self.get(i).transpose()).collect()
    }

    /// Memory in use, in bytes.
    pub fn resident(&self) -> u64 {
        let of = |p: &SourceSamples| {
            let chosen = p.chosen.as_ref().map_or(0, List::resident);
            chosen + p.store.tokens.resident() + p.store.records.resident()
        };
        self.parts.iter().map(of).sum()
    }

    /// The token hash of every source. Identifies the samples without reading tokens.
    pub(crate) fn hashes(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|p| p.store.hash.as_str())
    }

    fn each_digest(&self, each: &mut dyn FnMut(usize, u64) -> Result<(), Error>) -> Result<(), Error> {
        for part in &self.parts {
            let (mut next, mut window) = (0, Window::default());
            each_record(&part.store.records, part.store.len, &mut |_| {}, &mut |number, record| {
                if next < part.len() && part.number(&mut window, next)? == number {
                    next += 1;
                    each(part.first + next - 1, record.digest)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Number of samples of `other` with the same ids as a sample of this set.
    ///
    /// # Errors
    /// As [`Samples::get`].
    pub fn shared_with(&self, other: &Samples) -> Result<usize, Error> {
        let (mut wanted, mut shared) = (Vec::new(), 0);
        other.each_digest(&mut |i, digest| {
            wanted.push((digest, saturating_u32(i)));
            if wanted.len() == LOOKED_FOR {
                shared += self.hold(&mut wanted, other)?;
                wanted.clear();
            }
            Ok(())
        })?;
        Ok(shared + self.hold(&mut wanted, other)?)
    }

    /// Number of the `wanted` samples of `other` (digest and index) with the same ids as a sample of this
    /// set.
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

    /// Splits into kept and removed samples. `out` takes the source and its number of samples, and returns
    /// a predicate for removal.
    pub(crate) fn split(
        self,
        scratch: &Scratch,
        out: &dyn Fn(usize, usize) -> Box<dyn Fn(usize) -> bool>,
    ) -> Result<(Self, Self), Error> {
        let (mut kept, mut taken) = (Self::default(), Self::default());
        for (source, part) in self.parts.into_iter().enumerate() {
            let (mut numbers, mut records) = (Window::default(), Window::default());
            let mut sample = |i: usize| {
                let number = part.number(&mut numbers, i)?;
                let entry = records.read::<ENTRY>(&part.store.records, (number * RECORD) as u64)?;
                Ok::<_, Error>((number, Entry::of(&entry).is_continued()))
            };
            let mut documents = 0;
            for i in 0..part.len() {
                documents += usize::from(!sample(i)?.1);
            }
            let out = out(source, documents);
            let (mut lists, mut begun, mut is_out) = ((scratch.list(), scratch.list()), 0, false);
            for i in 0..part.len() {
                let (number, continued) = sample(i)?;
                if !continued {
                    (is_out, begun) = (out(begun), begun + 1);
                }
                let list = if is_out { &mut lists.1 } else { &mut lists.0 };
                list.push(saturating_u32(number))?;
            }
            kept.push(part.store.clone(), Some(lists.0.finish()?));
            taken.push(part.store, Some(lists.1.finish()?));
        }
        Ok((kept, taken))
    }
}

/// Reads records of the index, sequential ones in batches.
pub struct Reader<'a> {
    samples: &'a Samples,
    /// Read-ahead per source: of the sample list and of the records.
    windows: Vec<(Window, Window)>,
}

impl Reader<'_> {
    /// The source of sample `i`, and the sample's number in the store.
    pub(crate) fn place(&mut self, i: usize) -> Result<(usize, usize), Error> {
        let Some((source, i)) = self.samples.within(i) else { return Ok((usize::MAX, usize::MAX)) };
        Ok((source, self.samples.parts[source].number(&mut self.windows[source].0, i)?))
    }

    /// The record of sample `i`, without tokens; an empty item if out of range.
    ///
    /// # Errors
    /// As [`Samples::get`].
    pub fn item(&mut self, i: usize) -> Result<Item, Error> {
        let (source, number) = self.place(i)?;
        let Some(part) = self.samples.parts.get(source) else { return Ok(Item::default()) };
        let at = (number * RECORD) as u64;
        let entry = Entry::of(&self.windows[source].1.read::<ENTRY>(&part.store.records, at)?);
        let (sample, tokens) = (saturating_u32(i), saturating_u32(entry.tokens()));
        let Entry { targets, chosen, weight, .. } = entry;
        let (weighted, kept, cut) = (entry.has_weights(), entry.kept(), entry.is_cut());
        let continued = entry.is_continued();
        Ok(Item { sample, tokens, targets, chosen, weight, weighted, kept, cut, continued })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Samples round-trip: labels equal to ids, no labels, other labels, 32-bit ids, weights, teachers, pairs,
        /// ratings.
        #[test]
        fn cached_samples_are_read_back_as_written(
            rows in prop::collection::vec(
                (prop::collection::vec((any::<u32>(), 0..4u8), 1..20), 0usize..3, any::<u16>()), 0..30),
        ) {
            let label = |id: u32, kind: u8| match kind {
                0 => IGNORE_INDEX,
                1 => 7,
                _ => i32::try_from(id).unwrap_or(i32::MAX),
            };
            let mut examples: Vec<Example> = rows.iter().map(|(tokens, source, line)| Example {
                ids: tokens.iter().map(|t| t.0).collect(),
                labels: tokens.iter().map(|(id, kind)| label(*id, *kind)).collect(),
                weights: if line % 3 == 0 { tokens.iter().map(|t| t.0 as f32).collect() } else { Vec::new() },
                content: match line % 5 {
                    0 => Content::Pair(1 + usize::from(*line) % tokens.len()),
                    1 => Content::Rated(line % 2 == 0),
                    _ => Content::Document,
                },
                scored: line % 7 == 0,
                source: *source,
                line: usize::from(*line),
                teacher: Teacher::default(),
            }).collect();
            for e in examples.iter_mut().filter(|e| e.line % 7 == 0) {
                let (kept, targets) = (1 + e.line % 3, e.targets());
                let ids = (0..(kept * targets) as u32).map(|i| u32::MAX - i).collect::<Vec<_>>();
                let logits = ids.iter().map(|i| *i as f32).collect();
                e.teacher = Teacher { kept, ids, logits };
            }
            examples.sort_by_key(|e| e.source);
            let samples = Samples::of(&examples).unwrap();
            prop_assert_eq!(samples.all().unwrap(), examples.clone());
            let mut reader = samples.reader();
            for (i, e) in examples.iter().enumerate() {
                let item = reader.item(i).unwrap();
                prop_assert_eq!((item.tokens as usize, item.targets as usize), (e.ids.len(), e.targets()));
            }
            prop_assert!(samples.get(examples.len()).unwrap().is_none());
            // after a split, every sample is in one half, in order
            let (even, odd) = samples.clone().split(&Scratch::default(), &|_, _| Box::new(|i| i % 2 == 1)).unwrap();
            let mut both = [even.all().unwrap(), odd.all().unwrap()].concat();
            both.sort_by_key(|e| e.source);
            prop_assert_eq!(both.len(), examples.len());
            // samples shared by both halves, by ids
            let ours: std::collections::HashSet<_> = even.all().unwrap().into_iter().map(|e| e.ids).collect();
            let shared = odd.all().unwrap().iter().filter(|e| ours.contains(&e.ids)).count();
            prop_assert_eq!(even.shared_with(&odd).unwrap(), shared);
            prop_assert_eq!(samples.shared_with(&even).unwrap(), even.len());
        }
    }
}
