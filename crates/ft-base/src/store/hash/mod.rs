//! Parallel BLAKE3 hashes of whole files, with a cache shared between commands.
//!
//! A cached hash is valid while path, device, inode, size, mtime and ctime of the file are unchanged.
//! Like git, the cache does not store the hash of a file modified shortly before reading: another change
//! within the resolution of the file system's clock would go unnoticed.

mod entry;
mod stat;
mod tree;

pub use stat::Stat;
pub use tree::whole;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use entry::CacheSlot;
use tree::{KnownBlocks, Tree};

use super::Error;
use super::cache::cache_folder;
use super::read::open_inside;

/// Hashes a file while it is read for another purpose. The reader passes the bytes to
/// [`StreamHasher::update`].
#[derive(Debug)]
pub struct StreamHasher {
    /// State of the file at the start.
    before: Stat,
    /// Start time.
    began: SystemTime,
    blocks: KnownBlocks,
}

impl StreamHasher {
    /// Starts hashing a file; `None` if the hash is cached.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn begin(file: &File, path: &Path) -> Result<Option<Self>, Error> {
        let before = Stat::of_file(file, path)?;
        let cached = CacheSlot::of(cache_folder(), path, &before).is_some_and(|s| s.get(&before).is_some());
        Ok((!cached).then(|| Self::new(before, SystemTime::now())))
    }

    fn new(before: Stat, began: SystemTime) -> Self {
        Self { blocks: KnownBlocks::new(before.size), before, began }
    }

    /// Records bytes read at offset `at` of the file. Only whole, aligned blocks are used.
    pub fn update(&self, at: u64, bytes: &[u8]) {
        self.blocks.update(at, bytes);
    }
}

/// A file written by this process, whose hash is known without reading it.
pub struct KnownHash {
    path: PathBuf,
    stat: Stat,
    blake3: String,
}

impl KnownHash {
    /// The file at `path`, with known hash `blake3`.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn new(path: PathBuf, blake3: String) -> Result<Self, Error> {
        let stat = std::fs::metadata(&path).map(|m| Stat::of(&m)).map_err(|e| Error::read(&path, e))?;
        Ok(Self { path, stat, blake3 })
    }

    /// Caches the hash, if the file is unchanged and later modifications would be visible. Best effort.
    pub fn keep(&self) {
        self.keep_in(cache_folder(), SystemTime::now());
    }

    fn keep_in(&self, folder: Option<PathBuf>, now: SystemTime) {
        let same = std::fs::metadata(&self.path).is_ok_and(|m| Stat::of(&m) == self.stat);
        let slot = CacheSlot::of(folder, &self.path, &self.stat);
        if let Some(slot) = slot.filter(|_| same && self.stat.settled(now)) {
            slot.put(&self.stat, &self.blake3);
        }
    }
}

/// Hash (64 hexadecimal digits) and size of an open file, from the cache if valid. Blocks seen by
/// `stream` are not read again.
///
/// # Errors
/// [`Error::Read`]; [`Error::Changed`] if the file changes meanwhile.
pub fn of(file: &File, path: &Path, stream: Option<&StreamHasher>) -> Result<(String, u64), Error> {
    of_in(cache_folder(), file, path, stream, SystemTime::now())
}

/// Like [`of`], for the file `name` in `dir`.
///
/// # Errors
/// As [`of`]; [`Error::Unsafe`] for anything but a plain file inside the folder.
pub fn of_inside(dir: &Path, name: &str) -> Result<(String, u64), Error> {
    let (file, path) = open_inside(dir, name)?;
    of(&file, &path, None)
}

fn of_in(
    folder: Option<PathBuf>,
    file: &File,
    path: &Path,
    stream: Option<&StreamHasher>,
    now: SystemTime,
) -> Result<(String, u64), Error> {
    let (before, now) = match stream {
        Some(p) => (p.before.clone(), p.began),
        None => (Stat::of_file(file, path)?, now),
    };
    let slot = CacheSlot::of(folder, path, &before);
    if stream.is_none()
        && let Some(blake3) = slot.as_ref().and_then(|s| s.get(&before))
    {
        return Ok((blake3, before.size));
    }
    let hash = Tree { file, bytes: before.size, known: stream.map(|s| &s.blocks) }.hash();
    if Stat::of_file(file, path)? != before {
        let problem = "another program changed it while it was read\nhint: wait until that is done".into();
        return Err(Error::Changed { path: path.to_path_buf(), problem });
    }
    let blake3 = hash.map_err(|e| Error::read(path, e))?.to_hex().to_string();
    if let Some(slot) = slot.filter(|_| before.settled(now)) {
        slot.put(&before, &blake3);
    }
    Ok((blake3, before.size))
}

#[cfg(test)]
mod tests {
    use super::entry::{CacheEntry, LEAST};
    use super::stat::TICK;
    use super::tree::{BLOCK, PIECE};
    use super::*;
    use std::fs;
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    /// Well after all writes of a test.
    fn later() -> SystemTime {
        SystemTime::now() + 2 * TICK
    }

    /// The moment of the last write to a file.
    fn written_at(path: &Path) -> SystemTime {
        fs::metadata(path).unwrap().modified().unwrap()
    }

    fn write_at(path: &Path, at: u64, byte: u8) {
        fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(&[byte], at).unwrap();
    }

    /// Regression: only both ends of files above 256 MiB were hashed once.
    #[test]
    fn every_byte_of_a_large_file_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("large");
        // A sparse file takes no disk space.
        let file = fs::File::create_new(&path).unwrap();
        file.set_len(300 << 20).unwrap();
        let file = fs::File::open(&path).unwrap();
        let mut hashes = vec![whole(&file).unwrap()];
        for at in [0, 1 << 20, (1 << 27) + 12345, (300 << 20) - 1] {
            write_at(&path, at, 1);
            hashes.push(whole(&file).unwrap());
        }
        let all: std::collections::BTreeSet<_> = hashes.iter().map(|h| h.to_hex().to_string()).collect();
        assert_eq!(all.len(), hashes.len());
    }

    #[test]
    fn pieces_make_the_hash_of_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        for len in [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 5 * PIECE + 77, 8 * PIECE - 1] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 2_654_435_761) as u8).collect();
            let path = dir.path().join("file");
            fs::write(&path, &bytes).unwrap();
            assert_eq!(whole(&fs::File::open(&path).unwrap()).unwrap(), blake3::hash(&bytes), "{len}");
        }
    }

    /// The hash of the whole file is correct, for any mix of seen and unseen parts.
    #[test]
    fn hashed_parts_of_a_file_are_not_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for len in [1, BLOCK, BLOCK + 1, 5 * PIECE + 77, 8 * PIECE] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 2_654_435_761) as u8).collect();
            fs::write(&path, &bytes).unwrap();
            let file = fs::File::open(&path).unwrap();
            let new = || StreamHasher::new(Stat::of_file(&file, &path).unwrap(), SystemTime::now());
            let hash =
                |p: &StreamHasher| Tree { file: &file, bytes: len, known: Some(&p.blocks) }.hash().unwrap();
            let whole = blake3::hash(&bytes);
            // Parts of several sizes, with gaps and repetitions.
            let passing = new();
            let mut at = 3.min(len);
            for (i, part) in [100_000, 7, BLOCK, 1_500_000, 3 * BLOCK, 1 << 30].into_iter().enumerate() {
                let part = part.min(len - at);
                let read = &bytes[at as usize..(at + part) as usize];
                (0..=i % 2).for_each(|_| passing.update(at, read));
                at = (at + part + i as u64 * 1000).min(len);
            }
            assert_eq!(hash(&passing), whole, "{len}");
            // Wrong bytes change the hash, so seen blocks are really not read again.
            let passing = new();
            passing.update(0, &vec![9; len as usize]);
            assert_eq!(hash(&passing) == whole, len <= BLOCK, "{len}");
        }
    }

    #[test]
    fn a_file_that_changes_while_it_goes_by_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model");
        fs::write(&path, vec![1u8; LEAST as usize]).unwrap();
        let file = fs::File::open(&path).unwrap();
        let passing = StreamHasher::new(Stat::of_file(&file, &path).unwrap(), later());
        let kept = || of_in(Some(dir.path().into()), &file, &path, Some(&passing), later());
        let hash = kept().unwrap().0;
        let place = CacheSlot::of(Some(dir.path().into()), &path, &passing.before).unwrap();
        assert_eq!(place.get(&passing.before), Some(hash));
        std::thread::sleep(Duration::from_millis(20));
        write_at(&path, 5, 7);
        assert!(matches!(kept(), Err(Error::Changed { .. })));
        // Truncation is detected as well.
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
        assert!(matches!(kept(), Err(Error::Changed { .. })));
    }

    /// A file just written is not hashed again later, unless modified.
    #[test]
    fn the_hash_of_a_written_file_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let at = || Some(dir.path().to_path_buf());
        let path = dir.path().join("tokens");
        fs::write(&path, vec![1u8; LEAST as usize]).unwrap();
        let written = KnownHash::new(path.clone(), "known".into()).unwrap();
        let hash = || of_in(at(), &fs::File::open(&path).unwrap(), &path, None, written_at(&path)).unwrap().0;
        written.keep_in(at(), written_at(&path));
        assert_ne!(hash(), "known", "it was written a moment ago");
        written.keep_in(at(), later());
        assert_eq!(hash(), "known");
        std::thread::sleep(Duration::from_millis(20));
        write_at(&path, 5, 7);
        assert_ne!(hash(), "known");
        written.keep_in(at(), later());
        assert_ne!(hash(), "known");
    }

    /// A cached hash is used only for the identical file. The test plants a false hash to detect its use.
    #[test]
    fn a_kept_hash_holds_for_the_same_file_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (at, cache) = (dir.path().to_path_buf(), dir.path().join("hashes"));
        let path = dir.path().join("model");
        let hash =
            |now| of_in(Some(at.clone()), &fs::File::open(&path).unwrap(), &path, None, now).unwrap().0;
        let kept = || fs::read_dir(&cache).into_iter().flatten().flatten().map(|e| e.path()).next();
        fs::write(&path, vec![1u8; LEAST as usize]).unwrap();
        let (fresh, real) = (written_at(&path), path.canonicalize().unwrap());
        let first = hash(fresh);
        assert_eq!(kept(), None, "it was written a moment ago");
        assert_eq!(hash(later()), first);
        let stat = Stat::of(&fs::metadata(&path).unwrap());
        let plant = |stat: &Stat| {
            let other = CacheEntry::checked(&real, stat, "planted");
            fs::write(kept().unwrap(), serde_json::to_vec(&other).unwrap()).unwrap();
        };
        plant(&stat);
        assert_eq!(hash(later()), "planted", "what is kept is not used");

        // Other bytes, with the mtime restored: the ctime differs.
        let times = fs::metadata(&path).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        write_at(&path, LEAST / 2, 9);
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_modified(times.modified().unwrap()).unwrap();
        let second = hash(later());
        assert!(second != first && second != "planted");
        // Replaced by another file of the same size and times.
        plant(&Stat::of(&fs::metadata(&path).unwrap()));
        assert_eq!(hash(later()), "planted");
        let beside = dir.path().join("beside");
        fs::write(&beside, vec![2u8; LEAST as usize]).unwrap();
        fs::rename(&beside, &path).unwrap();
        let third = hash(later());
        assert!(third != second && third != "planted");
        // A damaged cache entry.
        let mut bytes = fs::read(kept().unwrap()).unwrap();
        let at = bytes.windows(3).position(|w| *w == third.as_bytes()[..3]).unwrap();
        bytes[at] = if bytes[at] == b'0' { b'1' } else { b'0' };
        fs::write(kept().unwrap(), &bytes).unwrap();
        assert_eq!(hash(later()), third);
        // Small files are not cached.
        fs::remove_dir_all(&cache).unwrap();
        fs::write(&path, b"small").unwrap();
        hash(later());
        assert_eq!(kept(), None);
    }
}
