//! Parallel BLAKE3 hashes of whole files, with a cache shared between commands.
//!
//! A cached hash is valid while path, device, inode, size, mtime and ctime of the file are unchanged.
//! Like git, the cache does not store the hash of a file modified shortly before reading: another change
//! within the resolution of the file system's clock would go unnoticed.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};
use serde::{Deserialize, Serialize};

use super::cache::{cache_folder, sweep_oldest};
use super::path::open_inside;
use super::{Error, write_atomic};

/// Bytes hashed at once: a subtree of the BLAKE3 tree (hence a power of two), sized to fit in a core's
/// L2 cache.
const BLOCK: u64 = 64 << 10;
/// Bytes per task; also a subtree.
const PIECE: u64 = 1 << 20;
/// Smaller files are not cached, because hashing is faster than a lookup.
const LEAST: u64 = 4 << 20;
/// A file modified this recently may change again without a visible difference.
const TICK: Duration = Duration::from_secs(2);
/// Maximum number of cached hashes; the oldest are removed.
const KEPT: usize = 1024;

/// Hashes a whole file, independent of the file position. Reads and hashes subtrees of the BLAKE3 tree
/// in parallel.
pub fn whole(file: &File) -> io::Result<blake3::Hash> {
    Tree { file, bytes: file.metadata()?.len(), passing: None }.hash()
}

/// The BLAKE3 tree of a file.
struct Tree<'a> {
    file: &'a File,
    bytes: u64,
    /// Blocks hashed earlier, if any.
    passing: Option<&'a Passing>,
}

impl Tree<'_> {
    fn hash(&self) -> io::Result<blake3::Hash> {
        let mut buffer = Vec::new();
        if self.bytes <= BLOCK {
            return Ok(self.block(0, self.bytes, &mut buffer)?.finalize());
        }
        let (left, right) = self.halves(0, self.bytes, &mut buffer)?;
        Ok(merge_subtrees_root(&left, &right, Mode::Hash))
    }

    fn halves(
        &self,
        at: u64,
        bytes: u64,
        buffer: &mut Vec<u8>,
    ) -> io::Result<(ChainingValue, ChainingValue)> {
        let left = left_subtree_len(bytes);
        if bytes <= PIECE {
            return Ok((self.subtree(at, left, buffer)?, self.subtree(at + left, bytes - left, buffer)?));
        }
        let half = |at, bytes| move || self.subtree(at, bytes, &mut Vec::new());
        let halves = rayon::join(half(at, left), half(at + left, bytes - left));
        Ok((halves.0?, halves.1?))
    }

    fn subtree(&self, at: u64, bytes: u64, buffer: &mut Vec<u8>) -> io::Result<ChainingValue> {
        if bytes > BLOCK {
            let (left, right) = self.halves(at, bytes, buffer)?;
            return Ok(merge_subtrees_non_root(&left, &right, Mode::Hash));
        }
        match self.passing.and_then(|p| p.blocks.get((at / BLOCK) as usize)?.get()) {
            Some(known) => Ok(*known),
            None => Ok(self.block(at, bytes, buffer)?.finalize_non_root()),
        }
    }

    /// Reads and hashes a block, through a buffer that stays in the CPU cache.
    fn block(&self, at: u64, bytes: u64, buffer: &mut Vec<u8>) -> io::Result<blake3::Hasher> {
        buffer.resize(bytes as usize, 0);
        self.file.read_exact_at(buffer, at)?;
        Ok(hashed(at, buffer))
    }
}

/// BLAKE3 state after a subtree starting at byte `at`.
fn hashed(at: u64, bytes: &[u8]) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(at);
    hasher.update(bytes);
    hasher
}

/// Hashes a file while it is read for another purpose. The reader passes the bytes to [`Passing::saw`].
#[derive(Debug)]
pub struct Passing {
    /// State of the file at the start.
    before: Stat,
    /// Start time.
    began: SystemTime,
    /// Chaining value of each whole block seen.
    blocks: Box<[OnceLock<ChainingValue>]>,
}

impl Passing {
    /// Starts hashing a file; `None` if the hash is cached.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn begin(file: &File, path: &Path) -> Result<Option<Self>, Error> {
        let before = Stat::of_file(file, path)?;
        let kept = Place::of(cache_folder(), path, &before).is_some_and(|p| p.look(&before).is_some());
        Ok((!kept).then(|| Self::new(before, SystemTime::now())))
    }

    fn new(before: Stat, began: SystemTime) -> Self {
        let blocks = (0..before.size / BLOCK).map(|_| OnceLock::new()).collect();
        Self { before, began, blocks }
    }

    /// Records bytes read at offset `at` of the file. Only whole, aligned blocks are used.
    pub fn saw(&self, at: u64, bytes: &[u8]) {
        let (before, blocks) = bytes.split_at(bytes.len().min((at.next_multiple_of(BLOCK) - at) as usize));
        let first = (at + before.len() as u64) / BLOCK;
        for (number, block) in (first..).zip(blocks.chunks_exact(BLOCK as usize)) {
            if let Some(known) = self.blocks.get(number as usize) {
                known.get_or_init(|| hashed(number * BLOCK, block).finalize_non_root());
            }
        }
    }
}

/// Identity and version of a file. Two equal values mean the same, unmodified file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    device: u64,
    inode: u64,
    size: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stat {
    fn of_file(file: &File, path: &Path) -> Result<Stat, Error> {
        file.metadata().map(|m| Stat::of(&m)).map_err(|e| Error::read(path, e))
    }

    /// From the metadata of a file.
    pub fn of(m: &Metadata) -> Stat {
        Stat {
            device: m.dev(),
            inode: m.ino(),
            size: m.len(),
            modified: (m.mtime(), m.mtime_nsec()),
            changed: (m.ctime(), m.ctime_nsec()),
        }
    }

    /// Whether a modification after `now` would change the time stamps.
    pub fn settled(&self, now: SystemTime) -> bool {
        let Some(since) = now.checked_sub(TICK).and_then(|t| t.duration_since(UNIX_EPOCH).ok()) else {
            return false;
        };
        let since = (since.as_secs() as i64, i64::from(since.subsec_nanos()));
        self.modified < since && self.changed < since
    }
}

/// A cache entry.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    path: PathBuf,
    stat: Stat,
    blake3: String,
    /// Checksum of the other fields, so that a damaged entry is not used.
    check: String,
}

impl Kept {
    fn checked(path: &Path, stat: &Stat, blake3: &str) -> Kept {
        let mut h = blake3::Hasher::new();
        h.update(path.as_os_str().as_bytes())
            .update(format!("{stat:?}").as_bytes())
            .update(blake3.as_bytes());
        let check = h.finalize().to_hex().to_string();
        Kept { path: path.to_path_buf(), stat: stat.clone(), blake3: blake3.to_string(), check }
    }
}

/// Location of the cache entry of a file.
struct Place {
    folder: PathBuf,
    /// Canonical path of the file.
    real: PathBuf,
}

impl Place {
    /// `None` for files not cached: small files, and paths that are not UTF-8.
    fn of(folder: Option<PathBuf>, path: &Path, stat: &Stat) -> Option<Place> {
        let real = path.canonicalize().ok().filter(|p| stat.size >= LEAST && p.to_str().is_some())?;
        Some(Place { folder: folder?.join("hashes"), real })
    }

    fn kept(&self) -> PathBuf {
        let name = blake3::hash(self.real.as_os_str().as_bytes()).to_hex();
        self.folder.join(&name.as_str()[..32])
    }

    /// The cached hash, if valid for the current state of the file.
    fn look(&self, stat: &Stat) -> Option<String> {
        let mut bytes = Vec::new();
        File::open(self.kept()).ok()?.take(1 << 16).read_to_end(&mut bytes).ok()?;
        let found: Kept = serde_json::from_slice(&bytes).ok()?;
        let sound = found.check == Kept::checked(&found.path, &found.stat, &found.blake3).check;
        (sound && found.path == self.real && found.stat == *stat).then_some(found.blake3)
    }

    /// Stores a hash. Best effort: without a writable cache folder, the next command hashes again.
    fn keep(&self, stat: &Stat, blake3: &str) {
        let bytes = serde_json::to_vec(&Kept::checked(&self.real, stat, blake3)).unwrap_or_default();
        if write_atomic(&self.kept(), &bytes).is_ok() {
            sweep_oldest(&self.folder, KEPT);
        }
    }
}

/// A file written by this process, whose hash is known without reading it.
pub struct Written {
    path: PathBuf,
    stat: Stat,
    blake3: String,
}

impl Written {
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
        if let Some(place) =
            Place::of(folder, &self.path, &self.stat).filter(|_| same && self.stat.settled(now))
        {
            place.keep(&self.stat, &self.blake3);
        }
    }
}

/// Hash (64 hexadecimal digits) and size of an open file, from the cache if valid. Blocks seen by
/// `passing` are not read again.
///
/// # Errors
/// [`Error::Read`]; [`Error::Changed`] if the file changes meanwhile.
pub fn of(file: &File, path: &Path, passing: Option<&Passing>) -> Result<(String, u64), Error> {
    of_in(cache_folder(), file, path, passing, SystemTime::now())
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
    passing: Option<&Passing>,
    now: SystemTime,
) -> Result<(String, u64), Error> {
    let (before, now) = match passing {
        Some(p) => (p.before.clone(), p.began),
        None => (Stat::of_file(file, path)?, now),
    };
    let place = Place::of(folder, path, &before);
    if passing.is_none()
        && let Some(blake3) = place.as_ref().and_then(|p| p.look(&before))
    {
        return Ok((blake3, before.size));
    }
    let tree = Tree { file, bytes: before.size, passing };
    let hash = tree.hash();
    if Stat::of_file(file, path)? != before {
        let problem = "another program changed it while it was read\n  hint: wait until that is done".into();
        return Err(Error::Changed { path: path.to_path_buf(), problem });
    }
    let blake3 = hash.map_err(|e| Error::read(path, e))?.to_hex().to_string();
    if let Some(place) = place.filter(|_| before.settled(now)) {
        place.keep(&before, &blake3);
    }
    Ok((blake3, before.size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Well after all writes of a test.
    fn later() -> SystemTime {
        SystemTime::now() + 2 * TICK
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
    fn what_went_by_is_not_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for len in [1, BLOCK, BLOCK + 1, 5 * PIECE + 77, 8 * PIECE] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 2_654_435_761) as u8).collect();
            fs::write(&path, &bytes).unwrap();
            let file = fs::File::open(&path).unwrap();
            let new = || Passing::new(Stat::of_file(&file, &path).unwrap(), SystemTime::now());
            let hash = |p: &Passing| Tree { file: &file, bytes: len, passing: Some(p) }.hash().unwrap();
            let whole = blake3::hash(&bytes);
            // Parts of several sizes, with gaps and repetitions.
            let passing = new();
            let mut at = 3.min(len);
            for (i, part) in [100_000, 7, BLOCK, 1_500_000, 3 * BLOCK, 1 << 30].into_iter().enumerate() {
                let part = part.min(len - at);
                let read = &bytes[at as usize..(at + part) as usize];
                (0..=i % 2).for_each(|_| passing.saw(at, read));
                at = (at + part + i as u64 * 1000).min(len);
            }
            assert_eq!(hash(&passing), whole, "{len}");
            // Wrong bytes change the hash, so seen blocks are really not read again.
            let passing = new();
            passing.saw(0, &vec![9; len as usize]);
            assert_eq!(hash(&passing) == whole, len <= BLOCK, "{len}");
        }
    }

    #[test]
    fn a_file_that_changes_while_it_goes_by_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model");
        fs::write(&path, vec![1u8; LEAST as usize]).unwrap();
        let file = fs::File::open(&path).unwrap();
        let passing = Passing::new(Stat::of_file(&file, &path).unwrap(), later());
        let kept = || of_in(Some(dir.path().into()), &file, &path, Some(&passing), later());
        let hash = kept().unwrap().0;
        let place = Place::of(Some(dir.path().into()), &path, &passing.before).unwrap();
        assert_eq!(place.look(&passing.before), Some(hash));
        std::thread::sleep(Duration::from_millis(20));
        write_at(&path, 5, 7);
        assert!(matches!(kept(), Err(Error::Changed { .. })));
        // Truncation is detected as well.
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
        assert!(matches!(kept(), Err(Error::Changed { .. })));
    }

    /// A file just written is not hashed again later, unless modified.
    #[test]
    fn the_hash_of_what_was_written_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let at = || Some(dir.path().to_path_buf());
        let path = dir.path().join("tokens");
        fs::write(&path, vec![1u8; LEAST as usize]).unwrap();
        let written = Written::new(path.clone(), "known".into()).unwrap();
        let hash = || of_in(at(), &fs::File::open(&path).unwrap(), &path, None, SystemTime::now()).unwrap().0;
        written.keep_in(at(), SystemTime::now());
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
        let (fresh, real) = (SystemTime::now(), path.canonicalize().unwrap());
        let first = hash(fresh);
        assert_eq!(kept(), None, "it was written a moment ago");
        assert_eq!(hash(later()), first);
        let stat = Stat::of(&fs::metadata(&path).unwrap());
        let plant = |stat: &Stat| {
            let other = Kept::checked(&real, stat, "planted");
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
