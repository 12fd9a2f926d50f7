//! Tokens that are kept between commands: what a pass over a source makes, in two files that are whole or absent.
//!
//! Their name is a hash of all that decides tokens: the bytes of the data files, of the tokenizer and the chat template,
//! and the recipe's keys. Where `data.max_length` cut nothing, any larger one finds them too. The one file has the tokens;
//! the other, which is written last, an index of the samples, what the pass found, and the hashes of both.
//!
//! A row that stops a run is never kept, and what a pass counted and told is kept with its tokens: a command says the same
//! with them and without.

use super::files::kind;
use super::format::Shape;
use super::record::RECORD;
use super::samples::{Store, Writer};
use super::stats::Found;
use super::strftime;
use ft_base::error::Place;
use ft_base::terminal::{tell, warn};
use ft_recipe::{Format};
use ft_base::store::hash::{self, Written};
use ft_base::store::{self, Pending};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Version of tokens and of their files: raised by any change in either (`tests::cached` compares a corpus).
const VERSION: u32 = 1;
/// Files of a model's folder that decide how text becomes tokens.
const TOKENIZER: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
];
/// Sources that are kept, and bytes of all of them together; those that were not used for longest go.
const KEPT: (usize, u64) = (256, 64 << 30);
/// Larger ones are told of.
const TOLD: u64 = 1 << 30;
/// Bytes behind an index: the length of its header, and the hash of all before.
const TAIL: usize = 8 + 32;
/// Bytes of a header, at the most.
const LONGEST_HEADER: u64 = 1 << 28;

/// What of a model's folder decides tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModelKey {
    hash: String,
    /// Whether a template may write the date.
    dated: bool,
}

impl ModelKey {
    /// Of the model folder `dir`, and of a template that is given; `None` where a template may write the time of day.
    pub fn of(dir: &Path, template: Option<&Path>) -> Option<Self> {
        let (mut h, mut dated) = (blake3::Hasher::new(), false);
        for path in TOKENIZER.iter().map(|f| dir.join(f)).chain(template.map(PathBuf::from)) {
            match store::read_plain(&path, store::LARGEST) {
                Ok(bytes) => {
                    // the one without a template, and the largest
                    if !path.ends_with(TOKENIZER[0]) {
                        let text = String::from_utf8_lossy(&bytes);
                        let now = text.contains("strftime_now");
                        let times =
                            |t: &str| t.trim_start_matches('-').starts_with(['H', 'I', 'M', 'S', 'p']);
                        if now && text.split('%').skip(1).any(times) {
                            return None;
                        }
                        dated |= now;
                    }
                    h.update(&(bytes.len() as u64 + 1).to_le_bytes()).update(&bytes)
                }
                Err(_) => h.update(&0u64.to_le_bytes()),
            };
        }
        Some(Self { hash: h.finalize().to_hex().to_string(), dated })
    }

    /// With tokens that the folder's tokenizer does not have.
    pub fn with(self, more: Option<&Vec<(String, u32)>>) -> Self {
        match more {
            None => self,
            Some(tokens) => Self { hash: format!("{} {}", self.hash, json!(tokens)), ..self },
        }
    }

    /// With the date, where that counts.
    fn today(&self) -> String {
        match self.dated {
            true => format!("{} {}", self.hash, strftime::now("%Y-%m-%d").unwrap_or_default()),
            false => self.hash.clone(),
        }
    }
}

/// What decides the tokens of a source.
pub(super) struct Key<'a> {
    pub shape: &'a Shape,
    pub source: &'a ft_recipe::Source,
    pub data: &'a ft_recipe::Data,
    /// Of the model, where one is known.
    pub model: Option<&'a ModelKey>,
    pub vocab_size: usize,
    pub files: &'a [PathBuf],
}

impl Key<'_> {
    /// As a name; `None` where it cannot be told.
    fn name(&self) -> Option<String> {
        let text = self.shape.format != Format::Tokens;
        let model = if text { Some(self.model?.today()) } else { None };
        let mut files = Vec::new();
        for path in self.files {
            let (hash, bytes) = hash::of(&store::open_plain(path).ok()?, path, None).ok()?;
            files.push(json!([format!("{:?}", kind(path)), bytes, hash]));
        }
        let key = json!({
            "ft": VERSION, "vocab": self.vocab_size, "files": files,
            "format": self.shape.format.word(), "fields": self.source.fields, "mask": self.shape.mask.word(),
            "template": self.data.template, "model": model,
        });
        Some(blake3::hash(key.to_string().as_bytes()).to_hex()[..32].to_string())
    }
}

/// What an index ends with.
#[derive(Serialize, Deserialize)]
struct Header {
    samples: usize,
    /// Bytes and hash of the tokens' file.
    bytes: u64,
    hash: String,
    found: Found,
    /// The data files, as the places in `found` name them.
    files: Vec<String>,
}

/// The folder of a cache that tokens are kept in.
pub(super) fn tokens_in(cache: &Path) -> PathBuf {
    cache.join("tokens")
}

/// The place of a source's tokens.
pub(super) struct Entry<'a> {
    folder: PathBuf,
    name: String,
    key: Key<'a>,
}

/// Whether a problem of a row would stop the command.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Strict(pub bool);

impl<'a> Entry<'a> {
    /// Of a source in a cache folder.
    pub fn of(cache: &Path, key: Key<'a>) -> Option<Self> {
        Some(Self { folder: tokens_in(cache), name: key.name()?, key })
    }

    fn limit(&self) -> String {
        format!("{}-{}", self.key.data.max_length, self.key.data.over_length.word())
    }

    fn path(&self, limit: &str, what: &str) -> PathBuf {
        self.folder.join(format!("{}-{limit}.{what}", self.name))
    }

    /// The tokens, if they are there and hold under the recipe's `max_length`; with `whole`, after a look at all of them.
    pub fn find(&self, strict: Strict, whole: bool) -> Option<(Store, Found)> {
        for limit in ["all", &self.limit()] {
            let path = self.path(limit, "index");
            if !path.exists() {
                continue;
            }
            match self.open(limit, strict, whole) {
                Ok(Some(found)) => {
                    // best effort: it says which was not used for longest
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
    ) -> Result<Option<(Store, Found)>, String> {
        let text = |e: &dyn std::fmt::Display| e.to_string();
        let [index_at, tokens_at] = ["index", "tokens"].map(|what| self.path(limit, what));
        let index = store::open_plain(&index_at).map_err(|e| text(&e))?;
        let size = index.metadata().map_err(|e| text(&e))?.len();
        let damaged = || "damaged".to_string();
        let mut tail = [0; TAIL];
        let body = size.checked_sub(TAIL as u64).ok_or_else(damaged)?;
        index.read_exact_at(&mut tail, body).map_err(|e| text(&e))?;
        let (length, sum) = tail.split_at(8);
        let length = length.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
        if length > LONGEST_HEADER.min(body) {
            return Err(damaged());
        }
        let mut header = vec![0; length as usize];
        index.read_exact_at(&mut header, body - length).map_err(|e| text(&e))?;
        let parsed: Header = serde_json::from_slice(&header).map_err(|_| damaged())?;
        if (parsed.samples as u64).checked_mul(RECORD as u64) != Some(body - length) {
            return Err(damaged());
        }
        let (mut found, data) = (parsed.found, self.key.data);
        let bad = found.drops.bad + found.drops.empty_mask > 0;
        // the first row that is bad would be an error; nothing was cut, and something would be
        if (strict && bad) || (limit == "all" && found.whole.longest() > data.max_length) {
            return Ok(None);
        }
        let tokens = store::open_plain(&tokens_at).map_err(|e| format!("{}: {e}", tokens_at.display()))?;
        let known = tokens.metadata().map_err(|e| text(&e))?.len() == parsed.bytes
            && (!whole || hash::of(&tokens, &tokens_at, None).map_err(|e| text(&e))?.0 == parsed.hash);
        let mut h = blake3::Hasher::new();
        let store =
            Store::open((tokens, tokens_at), (index, index_at), parsed.samples, parsed.hash, &mut |b| {
                h.update(b);
            });
        let store = store.map_err(|e| text(&e))?;
        h.update(&header).update(&tail[..8]);
        if !known || h.finalize().as_bytes() != sum || store.bytes() != parsed.bytes {
            return Err(damaged());
        }
        // the files may have other names now
        let now: BTreeMap<&String, String> =
            parsed.files.iter().zip(self.key.files).map(|(was, f)| (was, f.display().to_string())).collect();
        for Place { file, .. } in found.places() {
            if let Some(name) = now.get(file) {
                file.clone_from(name);
            }
        }
        Ok(Some((store, found)))
    }

    /// One process at a time makes the tokens of a source: waits for its turn. `None` where the file system has no locks.
    pub fn turn(&self) -> Option<File> {
        std::fs::create_dir_all(&self.folder).ok()?;
        let path = self.folder.join(format!("{}.lock", self.name));
        let file = File::options().create(true).append(true).open(path).ok()?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                tell(&format!("waiting for another process that tokenizes {}", self.key.source.source));
                file.lock().ok()?;
            }
            Err(TryLockError::Error(_)) => return None,
        }
        Some(file)
    }

    /// Where the tokens are written before it is known what their name is.
    pub fn writer(&self) -> Result<Writer, store::Error> {
        let _ = store::sweep_temporary(&self.folder);
        let pending = || Pending::create(&self.folder.join(&self.name), None);
        Ok(Writer::files(pending()?, pending()?))
    }

    /// Whether data, tokenizer and date are still what the name says.
    pub fn holds(&self) -> bool {
        self.key.name().as_ref() == Some(&self.name)
    }

    /// Gives what was written its name.
    ///
    /// # Errors
    /// Files that cannot be written.
    pub fn keep(&self, mut writer: Writer, found: &Found) -> Result<Written, store::Error> {
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
        // an index is of the tokens that are there
        let [index, tokens] = ["index", "tokens"].map(|what| self.path(&limit, what));
        let _ = std::fs::remove_file(&index);
        writer.tokens.commit_as(&tokens)?;
        let written = Written::new(tokens, header.hash)?;
        records.commit_as(&index)?;
        if bytes > TOLD {
            let (gib, folder) = (bytes as f64 / f64::from(1 << 30), self.folder.display());
            tell(&format!(
                "the tokens of {} are kept in {folder} ({gib:.1} GiB); data.cache = false keeps none",
                self.key.source.source
            ));
        }
        sweep(&self.folder, &format!("{}-{limit}", self.name), KEPT);
        Ok(written)
    }
}

/// Removes what was not used for longest, where there is more than `most`; `newest` stays.
fn sweep(folder: &Path, newest: &str, most: (usize, u64)) {
    let mut all: BTreeMap<String, (SystemTime, u64)> = BTreeMap::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let (Some(stem), Ok(about)) = (path.file_stem().and_then(|s| s.to_str()), entry.metadata()) else {
            continue;
        };
        if stem.starts_with('.') {
            continue;
        }
        let one = all.entry(stem.into()).or_insert((SystemTime::UNIX_EPOCH, 0));
        *one = (one.0.max(about.modified().unwrap_or(SystemTime::UNIX_EPOCH)), one.1 + about.len());
    }
    let mut left = (all.len(), all.values().map(|a| a.1).sum::<u64>());
    let mut oldest: Vec<_> = all.into_iter().filter(|(stem, _)| stem != newest).collect();
    oldest.sort_by_key(|(_, (used, _))| *used);
    for (stem, (_, bytes)) in oldest {
        if left.0 <= most.0 && left.1 <= most.1 {
            return;
        }
        // the index first: tokens without one are nothing. A process that has them open goes on with them
        for what in ["index", "tokens", "lock"] {
            let _ = std::fs::remove_file(folder.join(format!("{stem}.{what}")));
        }
        left = (left.0 - 1, left.1.saturating_sub(bytes));
    }
}

/// What a pass says where tokens cannot be kept.
pub(super) fn not_kept(why: &store::Error) {
    warn(&format!(
        "the tokens cannot be kept, and stay in memory: {why}\n  hint: FT_CACHE names another folder; data.cache = false \
         keeps none"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_used_for_longest_goes_whole() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, age: u64| {
            let path = dir.path().join(name);
            std::fs::write(&path, [0; 10]).unwrap();
            let then = SystemTime::now() - std::time::Duration::from_secs(age);
            File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
        };
        for (name, age) in [("a", 30), ("b", 20), ("c", 10), ("d", 99)] {
            write(&format!("{name}.tokens"), 1000);
            write(&format!("{name}.index"), age);
        }
        let left = || {
            let names =
                std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
            let mut all: Vec<String> = names.collect();
            all.sort();
            all.join(" ")
        };
        // d is the one that was just written
        sweep(dir.path(), "d", (3, 1000));
        assert_eq!(left(), "b.index b.tokens c.index c.tokens d.index d.tokens");
        sweep(dir.path(), "d", (99, 45));
        assert_eq!(left(), "c.index c.tokens d.index d.tokens");
        sweep(dir.path(), "d", (99, 1));
        assert_eq!(left(), "d.index d.tokens");
    }

    #[test]
    fn a_template_with_the_time_of_day_has_no_key_and_one_with_the_date_has_todays() {
        let dir = tempfile::tempdir().unwrap();
        let of = |template: &str| {
            std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
            ModelKey::of(dir.path(), None)
        };
        let plain = of("{{ messages }}").unwrap();
        assert!(!plain.dated && plain.today() == plain.hash);
        let dated = of("{{ strftime_now('%d %b %Y') }}{%- set x = 1 %}").unwrap();
        assert!(dated.dated && dated.today().ends_with(&strftime::now("%Y-%m-%d").unwrap()));
        assert_eq!(of("{{ strftime_now('%-H:%M') }}"), None);
        assert_ne!(of("{{ messages[0] }}").unwrap().hash, plain.hash);
        let given = dir.path().join("other.jinja");
        std::fs::write(&given, "{{ strftime_now('%H') }}").unwrap();
        assert_eq!(ModelKey::of(dir.path(), Some(&given)), None);
    }
}
