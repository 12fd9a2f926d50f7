//! Positioned reads from memory or a file, and append-only lists of integers that spill to an unnamed file
//! when long.
//!
//! Files are read by position, and never mapped: a truncated file or a failing disk gives an error, where a
//! mapping would end the process by SIGBUS.

use crate::error::Error;
use ft_base::store::{self, AtomicFile};
use ft_base::terminal::warn;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest file in bytes to hold in memory.
pub(super) const SMALL: usize = 1 << 20;
/// Read-ahead of sequential access, in bytes.
const AT_ONCE: u64 = 1 << 15;
/// Largest gap in bytes between two reads that still counts as sequential.
const NEAR: u64 = AT_ONCE / 16;

/// Bytes in memory or in a file.
#[derive(Debug)]
pub(crate) enum Bytes {
    Memory(Vec<u8>),
    File { file: File, path: PathBuf, len: u64 },
}

impl Default for Bytes {
    fn default() -> Self {
        Bytes::Memory(Vec::new())
    }
}

impl Bytes {
    /// Fills a buffer from offset `at`.
    pub fn read(&self, at: u64, buffer: &mut [u8]) -> Result<(), Error> {
        match self {
            Bytes::Memory(bytes) => {
                let start = usize::try_from(at).unwrap_or(usize::MAX);
                let found = start.checked_add(buffer.len()).and_then(|end| bytes.get(start..end));
                buffer.copy_from_slice(found.ok_or_else(|| {
                    Error::read(Path::new("the tokens of this command"), io::ErrorKind::UnexpectedEof.into())
                })?);
                Ok(())
            }
            Bytes::File { file, path, .. } => {
                file.read_exact_at(buffer, at).map_err(|cause| Error::read(path, cause))
            }
        }
    }

    /// Memory in use, in bytes.
    pub fn resident(&self) -> u64 {
        match self {
            Bytes::Memory(bytes) => bytes.len() as u64,
            Bytes::File { .. } => 0,
        }
    }
}

/// Read-ahead buffer: sequential reads are batched, random reads are not.
#[derive(Default)]
pub(crate) struct Window {
    at: u64,
    part: Vec<u8>,
    last: u64,
}

impl Window {
    /// Reads `N` bytes at offset `at`. A window serves a single file.
    pub fn read<const N: usize>(&mut self, from: &Bytes, at: u64) -> Result<[u8; N], Error> {
        let mut out = [0; N];
        let Bytes::File { len, .. } = from else {
            from.read(at, &mut out)?;
            return Ok(out);
        };
        let follows = at >= self.last && at - self.last <= NEAR;
        self.last = at;
        if self.held(at, &mut out) {
            return Ok(out);
        }
        if follows && at < *len {
            self.part.resize((len - at).min(AT_ONCE) as usize, 0);
            self.at = at;
            if let Err(e) = from.read(at, &mut self.part) {
                self.part.clear();
                return Err(e);
            }
            if self.held(at, &mut out) {
                return Ok(out);
            }
        }
        from.read(at, &mut out)?;
        Ok(out)
    }

    fn held(&self, at: u64, out: &mut [u8]) -> bool {
        let start = at.checked_sub(self.at).and_then(|i| usize::try_from(i).ok());
        let found = start.and_then(|i| self.part.get(i..i.checked_add(out.len())?));
        found.map(|bytes| out.copy_from_slice(bytes)).is_some()
    }
}

/// Storage for long lists.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scratch {
    /// Folder for unnamed files; without one, lists stay in memory.
    folder: Option<PathBuf>,
    /// Bytes of a list buffered in memory before a write.
    pub few: usize,
}

impl Scratch {
    /// Uses `folder`, if given.
    pub fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, few: SMALL / 4 }
    }

    /// Starts a list.
    pub fn list(&self) -> Spool {
        Spool { scratch: self.clone(), part: Vec::new(), file: None, written: 0 }
    }
}

/// A list under construction.
pub(crate) struct Spool {
    scratch: Scratch,
    part: Vec<u8>,
    file: Option<(File, PathBuf)>,
    written: u64,
}

impl Spool {
    /// Appends a number. If the disk is full, the list moves back to memory.
    pub fn push(&mut self, number: u32) -> Result<(), Error> {
        self.part.extend(number.to_le_bytes());
        if self.part.len() >= self.scratch.few && self.scratch.folder.is_some() {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        if self.file.is_none()
            && let Some(folder) = self.scratch.folder.take()
        {
            let path = folder.join("list");
            // an unwritable folder keeps the list in memory, as for tokens
            self.file = AtomicFile::create(&path, None).ok().map(|p| (p.unnamed(), path));
            self.scratch.folder = self.file.as_ref().map(|_| folder);
        }
        let Some((file, path)) = &mut self.file else { return Ok(()) };
        match file.write_all(&self.part) {
            Ok(()) => {
                self.written += self.part.len() as u64;
                self.part.clear();
            }
            Err(e) => {
                let why = store::Error::write("write", path, e);
                warn(&format!(
                    "a list of samples stays in memory: {why}\n  hint: FT_CACHE names another folder"
                ));
                let mut all = vec![0; self.written as usize];
                file.read_exact_at(&mut all, 0).map_err(|cause| Error::read(path, cause))?;
                all.append(&mut self.part);
                self.part = all;
                (self.file, self.scratch.folder) = (None, None);
            }
        }
        Ok(())
    }

    /// Finishes the list.
    pub fn finish(mut self) -> Result<List, Error> {
        if self.file.is_some() {
            self.flush()?;
        }
        let bytes = match self.file {
            Some((file, path)) => Bytes::File { file, path, len: self.written },
            None => {
                self.part.shrink_to_fit();
                self.written = self.part.len() as u64;
                Bytes::Memory(self.part)
            }
        };
        Ok(List { len: (self.written / 4) as usize, bytes: Arc::new(bytes) })
    }
}

/// A read-only list of `u32`.
#[derive(Clone, Debug, Default)]
pub(crate) struct List {
    len: usize,
    bytes: Arc<Bytes>,
}

impl List {
    /// Number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Entry `i`.
    pub fn at(&self, window: &mut Window, i: usize) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(window.read(&self.bytes, 4 * i as u64)?))
    }

    /// The entries of a range.
    pub fn range(&self, range: Range<usize>) -> Result<Vec<u32>, Error> {
        let mut bytes = vec![0; 4 * range.len()];
        self.bytes.read(4 * range.start as u64, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
    }

    /// Memory in use, in bytes.
    pub fn resident(&self) -> u64 {
        self.bytes.resident()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::small_disk::SmallDisk;
    use proptest::prelude::*;

    fn holding(folder: &Path, few: usize) -> Scratch {
        Scratch { folder: Some(folder.into()), few }
    }

    #[test]
    fn a_full_disk_leaves_a_list_in_memory() {
        let Some(disk) = SmallDisk::new() else { return };
        // 256 KiB hold at most 65,536 numbers
        for n in [60_000, 70_000, 200_000] {
            let mut spool = holding(disk.path(), 1000).list();
            (0..n).try_for_each(|i| spool.push(i * 3)).unwrap();
            let list = spool.finish().unwrap();
            assert_eq!(list.range(0..list.len()).unwrap(), (0..n).map(|i| i * 3).collect::<Vec<_>>());
            assert_eq!(list.resident() > 0, n > 65_536);
        }
    }

    #[test]
    fn only_a_read_near_the_last_one_reads_ahead() {
        let dir = tempfile::tempdir().unwrap();
        let mut spool = holding(dir.path(), 1000).list();
        (0..100_000).try_for_each(|i| spool.push(i)).unwrap();
        let (list, mut window) = (spool.finish().unwrap(), Window::default());
        let near = NEAR as usize / 4;
        for (i, ahead) in [(50_000, 0), (50_001 + near, 0), (50_001 + 2 * near, AT_ONCE as usize)] {
            assert_eq!(list.at(&mut window, i).unwrap() as usize, i);
            assert_eq!(window.part.len(), ahead);
        }
    }

    proptest! {
        /// Lists round-trip for any spill threshold and any access order.
        #[test]
        fn spooled_lists_are_read_back_as_written(
            numbers in prop::collection::vec(any::<u32>(), 1..30_000), few in 1usize..200_000,
            jumps in prop::collection::vec((any::<prop::sample::Index>(), 1usize..600), 0..20),
        ) {
            let dir = tempfile::tempdir().unwrap();
            for scratch in [holding(dir.path(), few), Scratch::new(None), holding(Path::new("/dev/null"), few)] {
                let mut spool = scratch.list();
                numbers.iter().try_for_each(|n| spool.push(*n)).unwrap();
                let list = spool.finish().unwrap();
                prop_assert_eq!(list.range(0..list.len()).unwrap(), &numbers[..]);
                let on_disk = scratch.folder.as_deref() == Some(dir.path()) && 4 * numbers.len() >= few;
                prop_assert_eq!(list.resident(), if on_disk { 0 } else { 4 * numbers.len() as u64 });
                let mut window = Window::default();
                for (from, step) in &jumps {
                    for i in (from.index(numbers.len())..numbers.len()).step_by(*step).take(300) {
                        prop_assert_eq!(list.at(&mut window, i).unwrap(), numbers[i]);
                    }
                }
                prop_assert!(list.at(&mut window, numbers.len()).is_err());
            }
            prop_assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }
}
