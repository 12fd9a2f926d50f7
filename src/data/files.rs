//! The files of a source, and how each holds rows.

use super::error::Error;
use crate::recipe;
use std::path::{Path, PathBuf};

/// How a file holds rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// JSON Lines: an object a line.
    Lines,
    /// One JSON array of objects.
    Array,
    /// A table of text with names in its first line, and the byte between its cells.
    Cells(u8),
    /// A text a line.
    Text,
    /// Parquet.
    Parquet,
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packed {
    Gzip,
    Zstd,
}

/// The names of files that rows are read from, for messages.
const KINDS: &str = ".jsonl, .json, .csv, .tsv, .txt (each also with .gz or .zst) and .parquet";

/// How a file holds rows, by its name; none where the name does not say.
pub(super) fn kind(path: &Path) -> Option<(Kind, Option<Packed>)> {
    let extension = |p: &Path| p.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
    let packed = match extension(path).as_str() {
        "gz" => Some(Packed::Gzip),
        "zst" => Some(Packed::Zstd),
        _ => None,
    };
    let inner = if packed.is_some() { path.with_extension("") } else { path.to_path_buf() };
    let kind = match extension(&inner).as_str() {
        "jsonl" | "ndjson" => Kind::Lines,
        "json" => Kind::Array,
        "csv" => Kind::Cells(b','),
        "tsv" => Kind::Cells(b'\t'),
        "txt" => Kind::Text,
        // it packs its columns itself
        "parquet" if packed.is_none() => Kind::Parquet,
        _ => return None,
    };
    Some((kind, packed))
}

/// Whether a file's name says that it holds rows.
pub fn holds_rows(path: &Path) -> bool {
    kind(path).is_some()
}

/// Bytes that a file of rows unpacks to for each that it has, about: texts are packed to a third or a fourth.
pub fn unpacks_to(path: &Path) -> u64 {
    match kind(path) {
        Some((Kind::Parquet, _) | (_, Some(_))) => 4,
        _ => 1,
    }
}

/// The files of a source, sorted by name: of a file itself, of a folder those that hold rows, and of a pattern
/// (`data/*.jsonl`, `data/**/part-?.parquet`) all that it matches.
///
/// # Errors
/// A source that is not there, or that holds no files of rows.
pub fn files(source: &recipe::Source, resolve: &dyn Fn(&str) -> PathBuf) -> Result<Vec<PathBuf>, Error> {
    if !source.fetched.is_empty() {
        return Ok(source.fetched.clone());
    }
    let path = resolve(&source.source);
    let fail = |message: String| Err(Error::Recipe { place: source.place.clone(), message });
    let Ok(there) = std::fs::metadata(&path) else {
        return match source.source.contains(['*', '?', '[']) {
            true => matching(source, resolve),
            false => absent(source, path),
        };
    };
    for (key, value) in [("split", &source.split), ("config", &source.config), ("revision", &source.revision)]
    {
        if let Some(value) = value {
            return fail(format!("{key} = {value:?} is for datasets of the hub; name a file of it instead"));
        }
    }
    if !there.is_dir() {
        return match kind(&path) {
            Some(_) => Ok(vec![path]),
            None => fail(format!("{:?} is none of the files that hold rows: {KINDS}", source.source)),
        };
    }
    let cannot = |cause| Error::Read { path: path.clone(), cause };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&path).map_err(cannot)? {
        let file = entry.map_err(cannot)?.path();
        let hidden = file.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'));
        if !hidden && kind(&file).is_some() && !file.is_dir() {
            found.push(file);
        }
    }
    found.sort();
    if found.is_empty() {
        let message = format!("the folder holds none of the files that hold rows: {KINDS}");
        return Err(Error::Empty { file: path.display().to_string(), message });
    }
    Ok(found)
}

/// The id of a dataset of the hub that a source's name can be: it is one where nothing of this name is here.
pub fn is_hub_id(source: &str) -> Option<&str> {
    let id = source.strip_prefix("hf://datasets/").unwrap_or(source);
    let spelled = id.split('/').count() == 2 && !id.starts_with(['.', '/', '~']) && !id.ends_with('/');
    (spelled && !id.contains(['*', '?', '[']) && kind(Path::new(id)).is_none()).then_some(id)
}

/// What is said of a source where there is nothing.
fn absent(source: &recipe::Source, path: PathBuf) -> Result<Vec<PathBuf>, Error> {
    Err(Error::Missing { source_name: source.source.clone(), path })
}

/// The files that a pattern matches; its folders up to the first wildcard are taken as they are.
fn matching(source: &recipe::Source, resolve: &dyn Fn(&str) -> PathBuf) -> Result<Vec<PathBuf>, Error> {
    let fail = |message: String| Error::Recipe { place: source.place.clone(), message };
    let text = source.source.as_str();
    let first = text.find(['*', '?', '[']).unwrap_or(text.len());
    let from = text[..first].rfind('/').map_or(0, |at| at + 1);
    let folder = resolve(if from == 0 { "." } else { &text[..from] });
    let folder = glob::Pattern::escape(&folder.display().to_string());
    let pattern = format!("{}/{}", folder.trim_end_matches('/'), &text[from..]);
    let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::new() };
    let found = glob::glob_with(&pattern, options).map_err(|e| fail(format!("{text:?}: {e}")))?;
    let mut files = Vec::new();
    for file in found {
        let file = file.map_err(|e| Error::Read { path: e.path().into(), cause: e.into() })?;
        if file.is_dir() {
            continue;
        }
        if kind(&file).is_none() {
            let file = file.display();
            return Err(fail(format!(
                "{text:?} matches {file}, which is none of the files that hold rows: {KINDS}"
            )));
        }
        files.push(file);
    }
    match files.is_empty() {
        true => Err(Error::Missing { source_name: text.into(), path: resolve(text) }),
        false => Ok(files),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_how_files_hold_rows() {
        let of = |name: &str| kind(Path::new(name));
        assert_eq!(of("a/b.jsonl"), Some((Kind::Lines, None)));
        assert_eq!(of("a/b.c.JSON"), Some((Kind::Array, None)));
        assert_eq!(of("b.csv.gz"), Some((Kind::Cells(b','), Some(Packed::Gzip))));
        assert_eq!(of("b.tsv.zst"), Some((Kind::Cells(b'\t'), Some(Packed::Zstd))));
        assert_eq!(of("b.parquet"), Some((Kind::Parquet, None)));
        for other in ["b.parquet.gz", "b.gz", "b", ".jsonl", "b.md"] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
