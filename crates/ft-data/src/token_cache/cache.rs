//! Token cache: encoded samples of a source, kept between commands in two files that are either complete or
//! absent.
//!
//! The file name is a hash of all inputs of tokenization: the bytes of the data files, of the tokenizer and
//! of the chat template, and the recipe's keys. If `data.max_length` cut nothing, all limits of at least the
//! longest sample share the entry. One file contains the tokens. The other is written last and contains the
//! index of samples, the counts of the pass, and hashes of both files.
//!
//! Rows that stop a run are never cached. Counts and notes are stored with the tokens, so a command prints
//! the same with and without a cache hit.

use super::record::RECORD;
use super::samples::{StoreWriter, TokenStore};
use super::stats::SourceStats;
use crate::read::files::kind;
use crate::shape::schema::Schema;
use crate::tokenize::model_key::ModelKey;
use ft_base::error::Location;
use ft_base::store::hash::{self, KnownHash};
use ft_base::store::{self, AtomicFile};
use ft_base::terminal::{tell, warn};
use ft_recipe::Format;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Version of the tokens and of the cache format; raised by any change of either. A test compares the tokens
/// of a corpus with a digest.
pub(crate) const VERSION: u32 = 13;
/// Versions of the libraries that make tokens, as in `Cargo.lock`.
pub(crate) const TOKENIZERS: &str = "0.23.2";
pub(crate) const MINIJINJA: &str = "3.0.5";
/// Cache limits: number of sources, and total bytes. Least recently used entries are removed first.
const LIMITS: (usize, u64) = (256, 64 << 30);
/// Entries above this size are reported, in bytes.
const REPORTED: u64 = 1 << 30;
/// Bytes at the end of an index file: header length and hash of everything before.
const TAIL: usize = 8 + 32;
const DAMAGED: &str = "damaged";
/// Largest header, in bytes.
const LONGEST_HEADER: u64 = 1 << 28;

/// Inputs that determine the tokens of a source.
pub(crate) struct CacheKey<'a> {
    pub schema: &'a Schema,
    pub source: &'a ft_recipe::Source,
    pub data: &'a ft_recipe::Data,
    pub has_tokenizer: bool,
    /// Key of the model; `None` without a tokenizer, or if its template may write the time of day.
    pub model: Option<&'a ModelKey>,
    pub vocab_size: usize,
    pub files: &'a [PathBuf],
}

impl CacheKey<'_> {
    /// The cache name; `None` without a model key or with unreadable files.
    fn name(&self) -> Option<String> {
        let model = match self.schema.format {
            Format::Tokens => None,
            // rows of ids
            Format::Preference | Format::Unpaired | Format::Labeled if !self.has_tokenizer => None,
            _ => Some(self.model?.today()),
        };
        let mut files = Vec::new();
        for path in self.files {
            let (hash, bytes) = hash::of(&store::open_plain(path).ok()?, path, None).ok()?;
            files.push(json!([format!("{:?}", kind(path)), bytes, hash]));
        }
        let part = self.source.is_part().then_some((&self.source.split, self.source.max_samples));
        let key = json!({
            "ft": VERSION, "tokenizers": TOKENIZERS, "minijinja": MINIJINJA, "vocab": self.vocab_size, "files": files,
            "format": self.schema.format.word(), "fields": self.source.fields, "mask": self.schema.mask.word(),
            "chat": self.schema.chat, "plain": self.schema.plain, "part": part, "encoding": self.source.encoding,
            "scores": self.data.scores.labels(), "taught": self.data.taught,
            "template": self.data.template, "model": model,
        });
        Some(blake3::hash(key.to_string().as_bytes()).to_hex()[..32].to_string())
    }
}

/// Trailer of an index file.
#[derive(Serialize, Deserialize)]
struct Header {
    samples: usize,
    /// Size of the token file in bytes.
    bytes: u64,
    hash: String,
    found: SourceStats,
    /// The data files, named as in the places of `found`.
    files: Vec<String>,
}

/// The token folder of a cache.
pub(crate) fn tokens_folder(cache: &Path) -> PathBuf {
    cache.join("tokens")
}

/// Cache entry of a source.
pub(crate) struct CacheEntry<'a> {
    folder: PathBuf,
    name: String,
    key: CacheKey<'a>,
}

/// Whether a bad row stops the command.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Strict(pub bool);

impl<'a> CacheEntry<'a> {
    /// The entry of a source in a cache folder.
    pub fn of(cache: &Path, key: CacheKey<'a>) -> Option<Self> {
        Some(Self { folder: tokens_folder(cache), name: key.name()?, key })
    }

    fn limit(&self) -> String {
        format!("{}-{}", self.key.data.max_length, self.key.data.over_length.word())
    }

    fn path(&self, limit: &str, what: &str) -> PathBuf {
        self.folder.join(format!("{}-{limit}.{what}", self.name))
    }

    /// Looks up tokens valid under the recipe's `max_length`. With `whole`, also verifies all bytes.
    pub fn find(&self, strict: Strict, whole: bool) -> Option<(TokenStore, SourceStats)> {
        for limit in ["all", &self.limit()] {
            let path = self.path(limit, "index");
            if !path.exists() {
                continue;
            }
            match self.open(limit, strict, whole) {
                Ok(Some(found)) => {
                    // best effort: the modification time records the last use
                    let _ = File::open(&path).and_then(|f| f.set_modified(SystemTime::now()));
                    return Some(found);
                }
                Ok(None) => {}
                Err(why) if whole => {
                    warn(&format!("{}: {why}; the tokens are made anew", path.display()));
                    let _ = std::fs::remove_file(&path);
                }
                Err(_) => {}
            }
        }
        None
    }

    fn open(
        &self,
        limit: &str,
        Strict(strict): Strict,
        whole: bool,
    ) -> Result<Option<(TokenStore, SourceStats)>, Box<dyn std::error::Error>> {
        let [index_at, tokens_at] = ["index", "tokens"].map(|what| self.path(limit, what));
        let index = store::open_plain(&index_at)?;
        let size = index.metadata()?.len();
        let mut tail = [0; TAIL];
        let body = size.checked_sub(TAIL as u64).ok_or(DAMAGED)?;
        index.read_exact_at(&mut tail, body)?;
        let (length, sum) = tail.split_first_chunk().ok_or(DAMAGED)?;
        let length = u64::from_le_bytes(*length);
        if length > LONGEST_HEADER.min(body) {
            return Err(DAMAGED.into());
        }
        let mut header = vec![0; length as usize];
        index.read_exact_at(&mut header, body - length)?;
        let parsed: Header = serde_json::from_slice(&header).map_err(|_| DAMAGED)?;
        if (parsed.samples as u64).checked_mul(RECORD as u64) != Some(body - length) {
            return Err(DAMAGED.into());
        }
        let (mut found, data) = (parsed.found, self.key.data);
        let bad = found.drops.bad + found.drops.empty_mask > 0;
        // strict mode must report the bad row, and a lower limit would cut samples
        if (strict && bad) || (limit == "all" && found.whole.longest() > data.max_length) {
            return Ok(None);
        }
        let tokens = store::open_plain(&tokens_at).map_err(|e| format!("{}: {e}", tokens_at.display()))?;
        let known = tokens.metadata()?.len() == parsed.bytes
            && (!whole || hash::of(&tokens, &tokens_at, None)?.0 == parsed.hash);
        let mut h = blake3::Hasher::new();
        let mut seen = |part: &[u8]| {
            h.update(part);
        };
        let store =
            TokenStore::open((tokens, tokens_at), (index, index_at), parsed.samples, parsed.hash, &mut seen)?;
        h.update(&header).update(&tail[..8]);
        if !known || h.finalize().as_bytes() != sum || store.bytes != parsed.bytes {
            return Err(DAMAGED.into());
        }
        // data files may have been renamed
        let now: BTreeMap<&String, String> =
            parsed.files.iter().zip(self.key.files).map(|(was, f)| (was, f.display().to_string())).collect();
        for Location { file, .. } in found.places() {
            if let Some(name) = now.get(file) {
                file.clone_from(name);
            }
        }
        Ok(Some((store, found)))
    }

    /// Locks the entry, so only one process tokenizes a source. `None` without file locks.
    pub fn lock(&self) -> Option<File> {
        std::fs::create_dir_all(&self.folder).ok()?;
        let path = self.folder.join(format!("{}.lock", self.name));
        loop {
            let file = store::append(&path).ok()?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    tell(&format!("waiting for another process that tokenizes {}", self.key.source.source));
                    file.lock().ok()?;
                }
                Err(TryLockError::Error(_)) => return None,
            }
            if is_linked(&file) {
                return Some(file);
            }
        }
    }

    /// Creates a writer with temporary names; the final name is known after the pass.
    pub fn writer(&self) -> Result<StoreWriter, store::Error> {
        let _ = store::sweep_temporary(&self.folder);
        let pending = || AtomicFile::create(&self.folder.join(&self.name), None);
        Ok(StoreWriter::files(pending()?, pending()?))
    }

    /// Whether data, tokenizer and date still match the name.
    pub fn is_current(&self) -> bool {
        self.key.name().as_ref() == Some(&self.name)
    }

    /// Commits the written files under the final name.
    pub fn commit(&self, mut writer: StoreWriter, found: &SourceStats) -> Result<KnownHash, store::Error> {
        writer.flush()?;
        let limit = if found.cut() == 0 { "all".to_string() } else { self.limit() };
        let header = Header {
            samples: writer.count,
            bytes: writer.bytes,
            hash: writer.tokens.hash().to_hex().to_string(),
            found: found.clone(),
            files: self.key.files.iter().map(|f| f.display().to_string()).collect(),
        };
        let text = serde_json::to_vec(&header).unwrap_or_default();
        let mut records = writer.records;
        records.write(&text)?;
        records.write(&(text.len() as u64).to_le_bytes())?;
        let sum = records.hash();
        records.write(sum.as_bytes())?;
        let bytes = writer.bytes + (writer.count * RECORD) as u64;
        // an index must never refer to other tokens
        let [index, tokens] = ["index", "tokens"].map(|what| self.path(&limit, what));
        let _ = std::fs::remove_file(&index);
        writer.tokens.commit_as(&tokens)?;
        let written = KnownHash::new(tokens, header.hash)?;
        records.commit_as(&index)?;
        if bytes > REPORTED {
            let (gib, folder) = (bytes as f64 / f64::from(1 << 30), self.folder.display());
            tell(&format!(
                "the tokens of {} are kept in {folder} ({gib:.1} GiB); data.cache = false keeps none",
                self.key.source.source
            ));
        }
        sweep(&self.folder, &format!("{}-{limit}", self.name), LIMITS);
        Ok(written)
    }
}

/// Removes least recently used entries beyond the limits `most`, but never `newest`; and locks that nobody holds
/// of sources without an entry.
fn sweep(folder: &Path, newest: &str, most: (usize, u64)) {
    let mut all: BTreeMap<String, (SystemTime, u64)> = BTreeMap::new();
    let mut locks: BTreeMap<String, PathBuf> = BTreeMap::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let (Some(stem), Ok(about)) = (path.file_stem().and_then(|s| s.to_str()), entry.metadata()) else {
            continue;
        };
        if stem.starts_with('.') {
            continue;
        }
        if path.extension().is_some_and(|e| e == "lock") {
            locks.insert(stem.into(), path);
            continue;
        }
        let one = all.entry(stem.into()).or_insert((SystemTime::UNIX_EPOCH, 0));
        *one = (one.0.max(about.modified().unwrap_or(SystemTime::UNIX_EPOCH)), one.1 + about.len());
    }
    let mut bytes: u64 = all.values().map(|(_, bytes)| bytes).sum();
    let others = all.iter().filter(|(stem, _)| *stem != newest);
    let mut oldest: Vec<_> = others.map(|(stem, (used, _))| (*used, stem.clone())).collect();
    oldest.sort();
    for (_, stem) in oldest {
        if all.len() <= most.0 && bytes <= most.1 {
            break;
        }
        // index first, since tokens without one are ignored; processes with open files can continue
        for what in ["index", "tokens"] {
            let _ = std::fs::remove_file(folder.join(format!("{stem}.{what}")));
        }
        bytes -= all.remove(&stem).map_or(0, |(_, bytes)| bytes);
    }
    locks.retain(|source, _| !all.keys().any(|entry| entry.split('-').next() == Some(source.as_str())));
    for path in locks.values() {
        if let Ok(file) = File::open(path)
            && file.try_lock().is_ok()
            && is_linked(&file)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Whether a locked file still has its name: a sweep may have removed it between open and lock.
fn is_linked(file: &File) -> bool {
    !file.metadata().is_ok_and(|m| m.nlink() == 0)
}

/// Warns about tokens that cannot be cached.
pub(crate) fn warn_uncached(why: &store::Error) {
    warn(&format!(
        "the tokens cannot be kept, and stay in memory: {why}\n  hint: FT_CACHE names another folder; \
        data.cache = false \
         keeps none"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_entry_is_removed_whole() {
        let dir = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        let write = |name: &str, age: u64| {
            let path = dir.path().join(name);
            std::fs::write(&path, [0; 10]).unwrap();
            let then = now - std::time::Duration::from_secs(age);
            File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
        };
        for (name, age) in [("a", 30), ("b", 20), ("c", 10), ("d", 99)] {
            write(&format!("{name}-all.tokens"), 1000);
            write(&format!("{name}-all.index"), age);
            write(&format!("{name}.lock"), 1000);
        }
        write("d-8-drop.index", 15);
        write("held.lock", 1000);
        let held = File::open(dir.path().join("held.lock")).unwrap();
        held.try_lock().unwrap();
        let left = || {
            let names =
                std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
            let mut all: Vec<String> = names.collect();
            all.sort();
            all.join(" ")
        };
        let of = |name: &str| format!("{name}-all.index {name}-all.tokens {name}.lock");
        // d-all was just written
        sweep(dir.path(), "d-all", (4, 1000));
        let d = of("d");
        assert_eq!(left(), format!("{} {} d-8-drop.index {d} held.lock", of("b"), of("c")));
        sweep(dir.path(), "d-all", (99, 50));
        assert_eq!(left(), format!("{} d-8-drop.index {d} held.lock", of("c")));
        // another entry of the same source
        sweep(dir.path(), "d-all", (2, 1000));
        assert_eq!(left(), format!("{} {d} held.lock", of("c")));
        sweep(dir.path(), "d-all", (99, 1));
        assert_eq!(left(), format!("{d} held.lock"));
    }
}
