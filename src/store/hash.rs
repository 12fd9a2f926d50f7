//! BLAKE3 of whole files, on all cores, and what is remembered of it between commands.
//!
//! A hash holds as long as the file is the same by path, device, inode, size and both of its times. As git does, a
//! hash of a file that changed a moment before it was read is not kept: it may change again in the same tick of the
//! file system's clock, and nothing would show it.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};
use serde::{Deserialize, Serialize};

use super::cache::{cache_folder, sweep_oldest};
use super::path::open_inside;
use super::{Error, write_atomic};

/// Bytes that one task reads and hashes; a subtree of BLAKE3's tree, so a power of two.
const PIECE: u64 = 1 << 20;
/// Bytes that are read at once: what the second cache of a core has room for.
const BUFFER: u64 = 64 << 10;
/// Smaller files are hashed faster than they are looked up.
const LEAST: u64 = 4 << 20;
/// A file that changed this shortly before it was read may change again without a trace.
const TICK: Duration = Duration::from_secs(2);
/// Hashes that are kept; the oldest go.
const KEPT: usize = 1024;

/// The hash of a whole file, wherever it was read to: the tree of BLAKE3, its subtrees read and hashed in parallel.
pub(crate) fn whole(file: &File) -> io::Result<blake3::Hash> {
    let bytes = file.metadata()?.len();
    if bytes <= PIECE {
        return Ok(piece(file, 0, bytes)?.finalize());
    }
    let (left, right) = halves(file, 0, bytes)?;
    Ok(merge_subtrees_root(&left, &right, Mode::Hash))
}

fn halves(file: &File, at: u64, bytes: u64) -> io::Result<(ChainingValue, ChainingValue)> {
    let left = left_subtree_len(bytes);
    let halves = rayon::join(|| subtree(file, at, left), || subtree(file, at + left, bytes - left));
    Ok((halves.0?, halves.1?))
}

fn subtree(file: &File, at: u64, bytes: u64) -> io::Result<ChainingValue> {
    if bytes <= PIECE {
        return Ok(piece(file, at, bytes)?.finalize_non_root());
    }
    let (left, right) = halves(file, at, bytes)?;
    Ok(merge_subtrees_non_root(&left, &right, Mode::Hash))
}

/// Reads and hashes a piece, through a buffer that stays in the cache.
fn piece(file: &File, at: u64, bytes: u64) -> io::Result<blake3::Hasher> {
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(at);
    let mut buffer = vec![0u8; bytes.min(BUFFER) as usize];
    let (mut at, end) = (at, at + bytes);
    while at < end {
        let part = &mut buffer[..(end - at).min(BUFFER) as usize];
        file.read_exact_at(part, at)?;
        hasher.update(part);
        at += part.len() as u64;
    }
    Ok(hasher)
}

/// A file as the system describes it. Two that are equal are one file that nobody has written since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stat {
    device: u64,
    inode: u64,
    /// Bytes.
    size: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stat {
    /// Of a file's metadata.
    pub(crate) fn of(m: &Metadata) -> Stat {
        Stat {
            device: m.dev(),
            inode: m.ino(),
            size: m.len(),
            modified: (m.mtime(), m.mtime_nsec()),
            changed: (m.ctime(), m.ctime_nsec()),
        }
    }

    /// Whether a change after `now` would show.
    pub(crate) fn settled(&self, now: SystemTime) -> bool {
        let Some(since) = now.checked_sub(TICK).and_then(|t| t.duration_since(UNIX_EPOCH).ok()) else {
            return false;
        };
        let since = (since.as_secs() as i64, i64::from(since.subsec_nanos()));
        self.modified < since && self.changed < since
    }
}

/// What is kept of a file.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    path: PathBuf,
    stat: Stat,
    blake3: String,
    /// Of the rest, so that damage here is not taken for a change there.
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

/// The hash of all bytes of an open file, 64 hexadecimal digits, and its size; read from what was kept where that
/// still holds.
///
/// # Errors
/// [`Error::Read`]; [`Error::Changed`] for a file that changes meanwhile.
pub(crate) fn of(file: &File, path: &Path) -> Result<(String, u64), Error> {
    let folder = cache_folder().map(|c| c.join("hashes"));
    of_in(folder.as_deref(), file, path, SystemTime::now())
}

/// As [`of`], of a file of a folder.
///
/// # Errors
/// As [`of`]; [`Error::Unsafe`] for what is not a plain file inside the folder.
pub(crate) fn of_inside(dir: &Path, name: &str) -> Result<(String, u64), Error> {
    let (file, path) = open_inside(dir, name)?;
    of(&file, &path)
}

fn of_in(folder: Option<&Path>, file: &File, path: &Path, now: SystemTime) -> Result<(String, u64), Error> {
    let stat = || file.metadata().map(|m| Stat::of(&m)).map_err(|e| Error::read(path, e));
    let before = stat()?;
    // A file whose path cannot be kept as text is hashed each time.
    let real = path.canonicalize().ok().filter(|p| before.size >= LEAST && p.to_str().is_some());
    let place = folder.zip(real).map(|(folder, real)| {
        let name = blake3::hash(real.as_os_str().as_bytes()).to_hex();
        (folder.join(&name.as_str()[..32]), real)
    });
    if let Some((kept, real)) = &place
        && let Some(blake3) = look(kept, real, &before)
    {
        return Ok((blake3, before.size));
    }
    let blake3 = whole(file).map_err(|e| Error::read(path, e))?.to_hex().to_string();
    if stat()? != before {
        let problem = "another program changed it while it was read\n  hint: wait until that is done".into();
        return Err(Error::Changed { path: path.to_path_buf(), problem });
    }
    if let Some((kept, real)) = place
        && before.settled(now)
    {
        let bytes = serde_json::to_vec(&Kept::checked(&real, &before, &blake3)).unwrap_or_default();
        // Best effort: without a cache folder that can be written, the next command hashes again.
        if write_atomic(&kept, &bytes).is_ok()
            && let Some(folder) = folder
        {
            sweep_oldest(folder, KEPT);
        }
    }
    Ok((blake3, before.size))
}

/// The hash that was kept, if it is of this file as it is.
fn look(kept: &Path, path: &Path, stat: &Stat) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(kept).ok()?.take(1 << 16).read_to_end(&mut bytes).ok()?;
    let found: Kept = serde_json::from_slice(&bytes).ok()?;
    let sound = found.check == Kept::checked(&found.path, &found.stat, &found.blake3).check;
    (sound && found.path == path && found.stat == *stat).then_some(found.blake3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Well after everything that a test writes.
    fn later() -> SystemTime {
        SystemTime::now() + 2 * TICK
    }

    fn write_at(path: &Path, at: u64, byte: u8) {
        fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(&[byte], at).unwrap();
    }

    /// Above 256 MiB only the ends were looked at once.
    #[test]
    fn every_byte_of_a_large_file_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("large");
        // a sparse file takes no disk
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

    /// A kept hash is used for the very same file alone: here what is kept is replaced by another hash, to see it used.
    #[test]
    fn a_kept_hash_holds_for_the_same_file_alone() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("hashes");
        let path = dir.path().join("model");
        let hash = |now| of_in(Some(&cache), &fs::File::open(&path).unwrap(), &path, now).unwrap().0;
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

        // other bytes with the times put back: the time of the change of the inode tells
        let times = fs::metadata(&path).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        write_at(&path, LEAST / 2, 9);
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_modified(times.modified().unwrap()).unwrap();
        let second = hash(later());
        assert!(second != first && second != "planted");
        // another file of the same size and times in its place
        plant(&Stat::of(&fs::metadata(&path).unwrap()));
        assert_eq!(hash(later()), "planted");
        let beside = dir.path().join("beside");
        fs::write(&beside, vec![2u8; LEAST as usize]).unwrap();
        fs::rename(&beside, &path).unwrap();
        let third = hash(later());
        assert!(third != second && third != "planted");
        // damage of what is kept
        let mut bytes = fs::read(kept().unwrap()).unwrap();
        let at = bytes.windows(3).position(|w| *w == third.as_bytes()[..3]).unwrap();
        bytes[at] = if bytes[at] == b'0' { b'1' } else { b'0' };
        fs::write(kept().unwrap(), &bytes).unwrap();
        assert_eq!(hash(later()), third);
        // small ones are not worth it
        fs::remove_dir_all(&cache).unwrap();
        fs::write(&path, b"small").unwrap();
        hash(later());
        assert_eq!(kept(), None);
    }
}
