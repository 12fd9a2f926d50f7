//! The files of a source, and how each holds rows.

use super::error::Error;
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
pub fn files(source: &ft_recipe::Source, resolve: &dyn Fn(&str) -> PathBuf) -> Result<Vec<PathBuf>, Error> {
    files_and_rest(source, resolve).map(|(files, _)| files)
}

/// The files of a source, and what to tell of the others that its folder has.
///
/// # Errors
/// As [`files`].
pub(super) fn files_and_rest(
    source: &ft_recipe::Source,
    resolve: &dyn Fn(&str) -> PathBuf,
) -> Result<(Vec<PathBuf>, Option<String>), Error> {
    let alone = |files| (files, None);
    if !source.fetched.is_empty() {
        return Ok(alone(source.fetched.clone()));
    }
    let path = resolve(&source.source);
    let fail = |message: String| Err(Error::Recipe { place: source.place.clone(), message });
    let Ok(there) = std::fs::metadata(&path) else {
        return match source.source.contains(['*', '?', '[']) {
            true => matching(source, resolve).map(alone),
            false => Err(Error::Missing { source_name: source.source.clone(), path }),
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
            Some(_) => Ok(alone(vec![path])),
            None => fail(format!("{:?} is none of the files that hold rows: {KINDS}", source.source)),
        };
    }
    let cannot = |cause| Error::Read { path: path.clone(), cause };
    let (mut found, mut rest) = (Vec::new(), Rest::default());
    for entry in std::fs::read_dir(&path).map_err(cannot)? {
        let entry = entry.map_err(cannot)?;
        let (file, name) = (entry.path(), entry.file_name().display().to_string());
        match (name.starts_with('.'), file.is_dir(), kind(&file)) {
            (true, ..) => rest.hidden.push(name),
            (_, true, _) => rest.folders.push(name),
            (_, _, None) => rest.others.push(name),
            _ => found.push(file),
        }
    }
    found.sort();
    if found.is_empty() {
        let message = format!("the folder holds none of the files that hold rows: {KINDS}");
        return Err(Error::Empty { file: path.display().to_string(), message });
    }
    Ok((found, rest.told(&source.source)))
}

/// Names of what a folder has beside files of rows.
#[derive(Default)]
struct Rest {
    folders: Vec<String>,
    hidden: Vec<String>,
    others: Vec<String>,
}

impl Rest {
    /// A sentence, if there is anything; a recipe calls the folder `source`.
    fn told(self, source: &str) -> Option<String> {
        let hint = match self.folders.is_empty() {
            true => String::new(),
            false => {
                let all = format!("{}/**/*.jsonl", source.trim_end_matches('/'));
                format!("\n  hint: a pattern takes what is in subfolders too: {all:?}")
            }
        };
        let told = |(mut names, one, more): (Vec<String>, &str, &str)| {
            names.sort();
            let first = names.first()?;
            Some(match names.len() {
                1 => format!("1 {one} ({first})"),
                n => format!("{n} {more} (the first: {first})"),
            })
        };
        let kinds = [
            (self.folders, "subfolder", "subfolders"),
            (self.hidden, "hidden file", "hidden files"),
            (self.others, "file of another kind", "files of other kinds"),
        ];
        let parts: Vec<String> = kinds.into_iter().filter_map(told).collect();
        let of = |parts: String| format!("not read of the folder {source:?}: {parts}{hint}");
        Some(parts.join(", ")).filter(|p| !p.is_empty()).map(of)
    }
}

/// The id of a dataset of the hub that a source's name can be: it is one where nothing of this name is here.
pub fn is_hub_id(source: &str) -> Option<&str> {
    let id = source.strip_prefix("hf://datasets/").unwrap_or(source);
    let spelled = id.split('/').count() == 2 && !id.starts_with(['.', '/', '~']) && !id.ends_with('/');
    (spelled && !id.contains(['*', '?', '[']) && kind(Path::new(id)).is_none()).then_some(id)
}

/// The files that a pattern matches; its folders up to the first wildcard are taken as they are.
fn matching(source: &ft_recipe::Source, resolve: &dyn Fn(&str) -> PathBuf) -> Result<Vec<PathBuf>, Error> {
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
