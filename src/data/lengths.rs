//! Lengths of a dataset's samples, kept between commands: enough for a plan to know rows and steps without
//! reading text or loading a tokenizer.
//!
//! What is kept holds for one list of sources under one tokenizer, template and mask, and says which files it was
//! counted from. A file whose size and time of change are those that were noted is taken to be the same, as git
//! does; any other is hashed.

use super::dataset::{Dataset, rows};
use super::error::Error;
use super::files::files;
use crate::recipe::{self, Format, OverLength, Part, Recipe};
use crate::store;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Version of the file's layout, and of what decides lengths.
const VERSION: u32 = 3;
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
/// A file that changed this shortly before it was noted may have changed again in the same tick of its clock.
const TICK: Duration = Duration::from_secs(2);
/// Lists that are kept; the oldest go.
const KEPT: usize = 64;

/// How long the samples of a list of sources are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lengths {
    /// Tokens and targets of each sample, in the order of sources and files.
    pub samples: Vec<(u32, u32)>,
    /// Samples of each source.
    pub sources: Vec<usize>,
    /// Samples that `max_length` cut or left out: with none, a larger one changes nothing.
    pub cut: usize,
}

/// The first line of a file.
#[derive(Serialize, Deserialize)]
struct Header {
    version: u32,
    sources: Vec<usize>,
    cut: usize,
    max_length: usize,
    over_length: String,
    files: Vec<Noted>,
    /// When the files were noted, in nanoseconds since 1970.
    noted: u64,
    /// BLAKE3 of what follows.
    hash: String,
}

/// A data file as it was.
#[derive(Serialize, Deserialize, PartialEq, Eq)]
struct Noted {
    path: String,
    size: u64,
    changed: u64,
    hash: String,
}

impl Lengths {
    /// Of a dataset that was read from `sources` sources.
    pub fn of(d: &Dataset, sources: usize) -> Self {
        let mut counts = vec![0; sources];
        let mut samples = Vec::with_capacity(d.examples.len());
        let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        for e in &d.examples {
            samples.push((small(e.ids.len()), small(e.targets())));
            if let Some(n) = counts.get_mut(e.source) {
                *n += 1;
            }
        }
        let drops = &d.stats.drops;
        let cut = d.stats.truncated + drops.too_long + drops.empty_after_truncation;
        Self { samples, sources: counts, cut }
    }

    /// Rows of an epoch, as [`Dataset::load`] makes them of the same part.
    ///
    /// # Errors
    /// Weights that make too many samples.
    pub fn rows(&self, part: Part, cfg: &recipe::Data, seed: u64) -> Result<Vec<Vec<usize>>, Error> {
        let mut end = 0;
        let ranges: Vec<Range<usize>> = self
            .sources
            .iter()
            .map(|n| {
                let start = end;
                end += n;
                start..end
            })
            .collect();
        rows(part, &ranges, &|i| self.samples[i].0 as usize, cfg, seed)
    }

    /// Bytes of the samples' ids and labels in memory.
    pub fn resident(&self) -> u64 {
        let tokens: u64 = self.samples.iter().map(|s| u64::from(s.0)).sum();
        8 * tokens + (self.samples.len() * size_of::<super::Example>()) as u64
    }
}

/// Keeps the lengths of a dataset; gives the file. Nothing is kept where there is no cache folder or it cannot be
/// written: a plan then assumes full rows.
pub fn save(r: &Recipe, dir: Option<&Path>, vocab: usize, part: Part, d: &Dataset) -> Option<PathBuf> {
    save_in(&store::cache_folder()?, r, dir, vocab, part, d)
}

fn save_in(
    cache: &Path,
    r: &Recipe,
    dir: Option<&Path>,
    vocab: usize,
    part: Part,
    d: &Dataset,
) -> Option<PathBuf> {
    let (path, files) = place(cache, r, dir, vocab, part)?;
    let now = SystemTime::now();
    let lengths = Lengths::of(d, r.data.sources(part).len());
    let body: Vec<u8> =
        lengths.samples.iter().flat_map(|(n, t)| [n.to_le_bytes(), t.to_le_bytes()]).flatten().collect();
    let header = Header {
        version: VERSION,
        sources: lengths.sources,
        cut: lengths.cut,
        max_length: r.data.max_length,
        over_length: r.data.over_length.word().into(),
        files: files.iter().map(|f| note(f, true)).collect::<Option<_>>()?,
        noted: nanoseconds(now),
        hash: blake3::hash(&body).to_hex().to_string(),
    };
    let mut bytes = serde_json::to_vec(&header).ok()?;
    bytes.push(b'\n');
    bytes.extend(body);
    store::write_atomic(&path, &bytes).ok()?;
    sweep(path.parent()?);
    Some(path)
}

/// The lengths that were kept of this part, if they still hold under the recipe's `max_length`.
pub fn find(r: &Recipe, dir: Option<&Path>, vocab: usize, part: Part) -> Option<Lengths> {
    find_in(&store::cache_folder()?, r, dir, vocab, part)
}

fn find_in(cache: &Path, r: &Recipe, dir: Option<&Path>, vocab: usize, part: Part) -> Option<Lengths> {
    if r.data.sources(part).is_empty() {
        return None;
    }
    let (path, files) = place(cache, r, dir, vocab, part)?;
    let bytes = store::read_plain(&path, store::LARGEST).ok()?;
    let end = bytes.iter().position(|b| *b == b'\n')?;
    let (header, body) = (serde_json::from_slice::<Header>(&bytes[..end]).ok()?, &bytes[end + 1..]);
    let whole = body.len() == 8 * header.sources.iter().sum::<usize>();
    if header.version != VERSION || !whole || header.hash != blake3::hash(body).to_hex().as_str() {
        return None;
    }
    let word = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    let samples: Vec<(u32, u32)> = body.chunks_exact(8).map(|b| (word(&b[..4]), word(&b[4..]))).collect();
    let d = &r.data;
    let same = header.max_length == d.max_length && header.over_length == d.over_length.word();
    let longest = samples.iter().map(|s| s.0 as usize).max().unwrap_or(0);
    // nothing was cut, and nothing would be
    if !same && (header.cut > 0 || longest > d.max_length) {
        return None;
    }
    // the run would stop at the first sample that is too long
    if d.over_length == OverLength::Error && header.cut > 0 {
        return None;
    }
    let all = header.files.len() == files.len();
    (all && files.iter().zip(&header.files).all(|(f, was)| holds(f, was, header.noted))).then_some(Lengths {
        samples,
        sources: header.sources,
        cut: header.cut,
    })
}

/// Whether a file is what it was when it was noted.
fn holds(file: &Path, was: &Noted, noted: u64) -> bool {
    let Some(now) = note(file, false) else { return false };
    if now.path != was.path || now.size != was.size {
        return false;
    }
    let settled = was.changed.saturating_add(TICK.as_nanos() as u64) <= noted;
    if settled && now.changed == was.changed {
        return true;
    }
    note(file, true).is_some_and(|n| n.hash == was.hash)
}

/// A file as it is, with the hash of its bytes if asked for.
fn note(file: &Path, whole: bool) -> Option<Noted> {
    let path = file.canonicalize().ok()?;
    let about = std::fs::metadata(&path).ok()?;
    let hash = match whole {
        true => hash_of(&path)?,
        false => String::new(),
    };
    Some(Noted {
        size: about.len(),
        changed: nanoseconds(about.modified().ok()?),
        path: spelled(&path),
        hash,
    })
}

fn nanoseconds(t: SystemTime) -> u64 {
    t.duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
}

fn hash_of(path: &Path) -> Option<String> {
    let mut h = blake3::Hasher::new();
    std::io::copy(&mut store::open_plain(path).ok()?, &mut h).ok()?;
    Some(h.finalize().to_hex().to_string())
}

/// Where the lengths of this part are kept, and the files that they are of.
fn place(
    cache: &Path,
    r: &Recipe,
    dir: Option<&Path>,
    vocab: usize,
    part: Part,
) -> Option<(PathBuf, Vec<PathBuf>)> {
    let sources = r.data.sources(part);
    let resolve = |s: &str| r.resolve(s);
    let mut all = Vec::new();
    let mut described = Vec::new();
    for s in sources {
        let found = files(s, &resolve).ok()?;
        let mask = s.mask.or(r.data.mask).map(recipe::Mask::word);
        let paths =
            found.iter().map(|f| Some(spelled(&f.canonicalize().ok()?))).collect::<Option<Vec<_>>>()?;
        described.push(json!({"format": s.format?.word(), "fields": s.fields, "mask": mask, "files": paths}));
        all.extend(found);
    }
    let mut h = blake3::Hasher::new();
    let text = json!({
        "ft": env!("CARGO_PKG_VERSION"), "version": VERSION, "vocab": vocab, "sources": described,
        "on_bad_row": r.data.on_bad_row.word(), "template": r.data.template,
        "split": (r.data.eval_share > 0.0).then(|| json!([r.data.eval_share, r.run.seed, part.key(&r.data)])),
    });
    h.update(text.to_string().as_bytes());
    if sources.iter().any(|s| s.format != Some(Format::Tokens)) {
        let template = r.data.chat_template.as_ref().map(|p| r.resolve(&p.display().to_string()));
        let of_model = dir.into_iter().flat_map(|d| TOKENIZER.iter().map(|f| d.join(f)));
        for path in of_model.chain(template) {
            match store::read_plain(&path, store::LARGEST) {
                Ok(bytes) => h.update(&(bytes.len() as u64 + 1).to_le_bytes()).update(&bytes),
                Err(_) => h.update(&0u64.to_le_bytes()),
            };
        }
    }
    let name = h.finalize().to_hex();
    Some((cache.join("lengths").join(&name.as_str()[..32]), all))
}

/// A path as text, another for each path: names need not be UTF-8.
fn spelled(path: &Path) -> String {
    match path.to_str() {
        Some(text) => text.into(),
        None => format!("{:?}", path.as_os_str().as_encoded_bytes()),
    }
}

/// Removes the oldest lists when there are too many.
fn sweep(dir: &Path) {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<(SystemTime, PathBuf)> =
        entries.filter_map(|e| Some((e.metadata().ok()?.modified().ok()?, e.path()))).collect();
    found.sort_unstable();
    for (_, path) in found.iter().take(found.len().saturating_sub(KEPT)) {
        // best effort: what stays takes some kilobytes
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Batches;
    use crate::plan::Workload;
    use serde_json::json;

    /// A folder with two sources of rows of tokens; rows of 3 to 40 of them.
    fn world() -> anyhow::Result<tempfile::TempDir> {
        let dir = tempfile::tempdir()?;
        for (name, n) in [("a.jsonl", 30usize), ("b.jsonl", 7)] {
            let row = |i: usize| json!({"input_ids": vec![i % 60; 3 + i * 11 % 38]}).to_string() + "\n";
            std::fs::write(dir.path().join(name), (0..n).map(row).collect::<String>())?;
        }
        Ok(dir)
    }

    fn recipe(dir: &Path, set: &[&str]) -> anyhow::Result<Recipe> {
        let text = "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"mlp\"]\n[data]\nmax_length = 64\n\
            [[data.train]]\nsource = \"a.jsonl\"\nformat = \"tokens\"\n\
            [[data.train]]\nsource = \"b.jsonl\"\nformat = \"tokens\"\n[run]\nbatch_rows = 4\nmicro_rows = 2\n";
        let path = dir.join("r.toml");
        std::fs::write(&path, text)?;
        Ok(Recipe::load(&path, &set.iter().map(|s| s.to_string()).collect::<Vec<_>>())?)
    }

    fn load(r: &Recipe) -> anyhow::Result<Dataset> {
        let resolve = |s: &str| r.resolve(s);
        Ok(Dataset::load(Part::Train, &r.data, &resolve, None, 64, r.run.seed)?)
    }

    #[test]
    fn lengths_make_the_rows_that_the_data_makes() -> anyhow::Result<()> {
        let (dir, cache) = (world()?, tempfile::tempdir()?);
        let kept = recipe(dir.path(), &[])?;
        let whole = load(&kept)?;
        save_in(cache.path(), &kept, None, 64, Part::Train, &whole).expect("kept");
        for set in [
            &[][..],
            &["data.pack=false"],
            &["data.shuffle=false", "run.steps=5"],
            &["run.seed=9", "run.micro_rows=4"],
            // nothing was cut at 64, and the longest has 40
            &["data.max_length=200"],
            &["data.max_length=40"],
        ] {
            let r = recipe(dir.path(), set)?;
            let d = load(&r)?;
            let found = find_in(cache.path(), &r, None, 64, Part::Train).expect("found");
            let rows = found.rows(Part::Train, &r.data, r.run.seed)?;
            assert_eq!(rows, d.rows, "{set:?}");
            let w = Workload::of_data(&r, &d, None);
            let e = w.epoch.expect("known");
            assert_eq!(
                (e.rows, e.tokens, e.targets),
                (d.rows.len() as u64, d.stats.tokens as u64, d.stats.targets as u64)
            );
            assert_eq!(w.steps, Some(Batches::new(d.rows.len(), &r.run, r.data.shuffle).steps() as u64));
        }
        // at 20 some are cut, which the lengths at 64 do not tell of
        let short = recipe(dir.path(), &["data.max_length=20"])?;
        assert_eq!(find_in(cache.path(), &short, None, 64, Part::Train), None);
        let cut = load(&short)?;
        save_in(cache.path(), &short, None, 64, Part::Train, &cut).expect("kept");
        assert!(find_in(cache.path(), &short, None, 64, Part::Train).is_some());
        assert_eq!(find_in(cache.path(), &kept, None, 64, Part::Train), None);
        Ok(())
    }

    #[test]
    fn what_changes_the_lengths_ends_them() -> anyhow::Result<()> {
        let (dir, cache) = (world()?, tempfile::tempdir()?);
        let r = recipe(dir.path(), &[])?;
        let d = load(&r)?;
        let file = save_in(cache.path(), &r, None, 64, Part::Train, &d).expect("kept");
        let found = |r: &Recipe, model: Option<&Path>, vocab| {
            find_in(cache.path(), r, model, vocab, Part::Train).is_some()
        };
        assert!(found(&r, None, 64));
        assert!(!found(&r, None, 65), "another vocabulary");
        let skip = recipe(dir.path(), &["data.on_bad_row=skip"])?;
        assert!(!found(&skip, None, 64), "other rows are left out");
        let named = recipe(dir.path(), &["data.train.0.fields.input_ids=ids"])?;
        assert!(!found(&named, None, 64), "another field");

        // the same bytes at another time are the same; other bytes of the same length are not
        let a = dir.path().join("a.jsonl");
        let bytes = std::fs::read(&a)?;
        std::fs::write(&a, &bytes)?;
        assert!(found(&r, None, 64));
        let mut other = bytes.clone();
        let digit = other.iter().position(u8::is_ascii_digit).expect("a digit");
        other[digit] ^= 1;
        std::fs::write(&a, &other)?;
        assert!(!found(&r, None, 64), "other data");
        std::fs::write(&a, &bytes)?;
        assert!(found(&r, None, 64));

        // a damaged file is none
        let mut kept = std::fs::read(&file)?;
        let last = kept.len() - 1;
        kept[last] ^= 1;
        std::fs::write(&file, &kept)?;
        assert!(!found(&r, None, 64));
        kept.truncate(last);
        std::fs::write(&file, &kept)?;
        assert!(!found(&r, None, 64));
        Ok(())
    }

    /// The tokenizer and the template count for text, not for tokens that are ready.
    #[test]
    fn a_tokenizer_belongs_to_the_name() -> anyhow::Result<()> {
        let (dir, cache, model) = (world()?, tempfile::tempdir()?, tempfile::tempdir()?);
        let text = recipe(dir.path(), &["data.train.0.format=text", "data.train.1.format=text"])?;
        let ready = recipe(dir.path(), &[])?;
        let at = |r: &Recipe| Some(place(cache.path(), r, Some(model.path()), 64, Part::Train)?.0);
        let before = (at(&text), at(&ready));
        assert!(before.0.is_some() && before.0 != before.1);
        std::fs::write(model.path().join("chat_template.jinja"), "{{ messages }}")?;
        assert_ne!(at(&text), before.0);
        assert_eq!(at(&ready), before.1);
        Ok(())
    }

    #[test]
    fn the_oldest_lists_go() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        for i in 0..KEPT + 3 {
            std::fs::write(dir.path().join(format!("{i:03}")), "x")?;
        }
        sweep(dir.path());
        assert_eq!(std::fs::read_dir(dir.path())?.count(), KEPT);
        Ok(())
    }
}
