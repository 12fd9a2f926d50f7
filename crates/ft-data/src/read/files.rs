//! Data files of a source, and file types.

use super::saved;
use crate::error::Error;
use std::collections::HashSet;
use std::fs::DirEntry;
use std::path::{Path, PathBuf};

/// Row layout of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// JSON Lines: one object per line.
    Lines,
    /// One JSON array of objects.
    Array,
    /// A text table with a header line, and the separator byte.
    Table(u8),
    /// One text per line.
    Text,
    Parquet,
    /// An Arrow file or stream.
    Arrow,
}

/// Compression of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    Gzip,
    Zstd,
}

/// Supported file names, for error messages.
const KINDS: &str = ".jsonl, .json, .csv, .tsv, .txt (each also with .gz or .zst), .parquet and .arrow";

/// The type of a file by name; `None` if unknown.
pub(crate) fn kind(path: &Path) -> Option<(Kind, Option<Compression>)> {
    let extension = |p: &Path| p.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
    let compression = match extension(path).as_str() {
        "gz" => Some(Compression::Gzip),
        "zst" => Some(Compression::Zstd),
        _ => None,
    };
    let inner = if compression.is_some() { path.with_extension("") } else { path.to_path_buf() };
    let kind = match extension(&inner).as_str() {
        "jsonl" | "ndjson" => Kind::Lines,
        "json" => Kind::Array,
        "csv" => Kind::Table(b','),
        "tsv" => Kind::Table(b'\t'),
        "txt" => Kind::Text,
        // Parquet is compressed internally
        "parquet" if compression.is_none() => Kind::Parquet,
        "arrow" if compression.is_none() => Kind::Arrow,
        _ => return None,
    };
    Some((kind, compression))
}

/// Whether a file name has a supported type.
pub fn holds_rows(path: &Path) -> bool {
    kind(path).is_some()
}

/// Approximate decompression ratio of a data file.
pub fn unpacks_to(path: &Path) -> u64 {
    match kind(path) {
        Some((Kind::Parquet, _) | (_, Some(_))) => 4,
        _ => 1,
    }
}

/// The data files of a source, sorted by name: a file itself, supported files of a folder, or matches of a
/// pattern (`data/*.jsonl`, `data/**/part-?.parquet`).
///
/// # Errors
/// A missing source, or one without data files.
pub fn files(source: &ft_recipe::Source, resolve: &dyn Fn(&str) -> PathBuf) -> Result<Vec<PathBuf>, Error> {
    files_and_ignored(source, resolve).map(|(files, _)| files)
}

/// As [`files`], with a message about ignored entries of a folder.
///
/// # Errors
/// As [`files`].
pub(crate) fn files_and_ignored(
    source: &ft_recipe::Source,
    resolve: &dyn Fn(&str) -> PathBuf,
) -> Result<(Vec<PathBuf>, Option<String>), Error> {
    let alone = |files| (files, None);
    if !source.fetched.is_empty() {
        return Ok(alone(source.fetched.clone()));
    }
    let path = resolve(&source.source);
    let fail = |message: String| Err(Error::recipe(source, message));
    let Ok(there) = std::fs::metadata(&path) else {
        return match source.source.as_str() {
            url if url.contains("://") => fail(format!(
                "{url:?} is a URL, and files are read from this machine\n  hint: download it, and name the path \
                 (without file://); a dataset of the hub has a name, \"owner/name\""
            )),
            pattern if pattern.contains(['*', '?', '[']) => matching(source, resolve).map(alone),
            name => Err(Error::Missing { source_name: name.into(), path }),
        };
    };
    let saved = there.is_dir() && saved::is_saved(&path);
    // the rows of other files are a split "train"
    let split = source.slice().0.filter(|name| *name != "train" && !saved);
    let [config, revision] = [&source.config, &source.revision].map(|v| v.as_deref());
    for (key, value) in [("split", split), ("config", config), ("revision", revision)] {
        if let Some(value) = value {
            return fail(format!("{key} = {value:?} is for datasets of the hub; name a file of it instead"));
        }
    }
    if saved {
        return saved::files(source, &path);
    }
    if !there.is_dir() {
        return match kind(&path) {
            Some(_) => Ok(alone(vec![path])),
            None => fail(format!("{:?} is none of the files that hold rows: {KINDS}", source.source)),
        };
    }
    let cannot = |cause| Error::read(&path, cause);
    let (mut found, mut ignored) = (Vec::new(), Ignored::default());
    for entry in std::fs::read_dir(&path).map_err(cannot)? {
        let entry = entry.map_err(cannot)?;
        let (file, name) = (entry.path(), entry.file_name().display().to_string());
        match (name.starts_with('.'), file.is_dir(), kind(&file)) {
            (true, ..) => ignored.hidden.push(name),
            (_, true, _) => ignored.folders.push(name),
            (_, _, None) => ignored.others.push(name),
            _ => found.push(file),
        }
    }
    found.sort();
    if found.is_empty() {
        let message = format!("the folder holds none of the files that hold rows: {KINDS}");
        return Err(Error::Empty { file: path.display().to_string(), message });
    }
    Ok((found, ignored.describe(&source.source)))
}

/// Ignored entries of a folder.
#[derive(Default)]
struct Ignored {
    folders: Vec<String>,
    hidden: Vec<String>,
    others: Vec<String>,
}

impl Ignored {
    /// Describes the ignored entries, if any; `source` is the folder's name in the recipe.
    fn describe(self, source: &str) -> Option<String> {
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

/// The id of a hub dataset spelled by a source name. Applies only if no local path of this name exists.
pub fn is_hub_id(source: &str) -> Option<&str> {
    let id = source.strip_prefix("hf://datasets/").unwrap_or(source);
    let spelled = id.split('/').count() == 2 && !id.starts_with(['.', '/', '~']) && !id.ends_with('/');
    (spelled && !id.contains(['*', '?', '[']) && kind(Path::new(id)).is_none()).then_some(id)
}

/// Files matching a pattern, each once. Folders before the first wildcard are literal.
fn matching(source: &ft_recipe::Source, resolve: &dyn Fn(&str) -> PathBuf) -> Result<Vec<PathBuf>, Error> {
    let fail = |message: String| Error::recipe(source, message);
    let text = source.source.as_str();
    let first = text.find(['*', '?', '[']).unwrap_or(text.len());
    let from = text[..first].rfind('/').map_or(0, |at| at + 1);
    let folder = resolve(if from == 0 { "." } else { &text[..from] });
    let (mut files, mut seen) = (Vec::new(), HashSet::new());
    for file in matches(folder, &text[from..], &|e| fail(format!("{text:?}: {e}")))? {
        // links lead to a file by several names
        if file.is_dir() || !seen.insert(file.canonicalize().unwrap_or_else(|_| file.clone())) {
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
    if files.is_empty() {
        Err(Error::Missing { source_name: text.into(), path: resolve(text) })
    } else {
        Ok(files)
    }
}

/// Paths below a folder that match a pattern, in order. `**` follows no symbolic links to folders: they may lead back.
fn matches(
    folder: PathBuf,
    pattern: &str,
    bad: &dyn Fn(glob::PatternError) -> Error,
) -> Result<Vec<PathBuf>, Error> {
    let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::new() };
    let entries = |folder: &Path| -> Result<Vec<DirEntry>, Error> {
        let all = std::fs::read_dir(folder).and_then(Iterator::collect);
        all.map_err(|cause| Error::read(folder, cause))
    };
    let mut found = vec![folder];
    // A last `**` stands for all files.
    for part in pattern.split('/').chain(pattern.ends_with("**").then_some("*")) {
        let name = glob::Pattern::new(part).map_err(bad)?;
        if !part.contains(['*', '?', '[']) {
            found = found.iter().map(|f| f.join(part)).filter(|f| f.exists()).collect();
            continue;
        }
        let mut folders = std::mem::take(&mut found);
        folders.retain(|f| f.is_dir());
        while let Some(folder) = folders.pop() {
            for entry in entries(&folder)? {
                let matching = name.matches_with(&entry.file_name().to_string_lossy(), options);
                if matching && part != "**" {
                    found.push(entry.path());
                // the entry's own type: a link is no folder
                } else if matching && entry.file_type().is_ok_and(|t| t.is_dir()) {
                    folders.push(entry.path());
                }
            }
            if part == "**" {
                found.push(folder);
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of the files of a pattern in `folder`.
    #[cfg(unix)]
    fn found(folder: &Path, pattern: &str) -> Vec<String> {
        let source = crate::tests::source(pattern, ft_recipe::Format::Text);
        let files = files(&source, &|s| folder.join(s)).unwrap();
        let name = |f: &PathBuf| f.strip_prefix(folder).unwrap().display().to_string();
        files.iter().map(name).collect()
    }

    #[test]
    #[cfg(unix)]
    fn patterns_find_each_file_once_and_follow_no_links_in_circles() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("data/deep/er")).unwrap();
        for name in ["data/b.txt", "data/deep/a.txt", "data/deep/er/c.txt"] {
            std::fs::write(at(name), "x").unwrap();
        }
        for (to, link) in
            [("..", "data/deep/up"), (".", "data/self"), (".", "data/same"), ("data/deep", "linked")]
        {
            std::os::unix::fs::symlink(to, at(link)).unwrap();
        }
        std::os::unix::fs::symlink("b.txt", at("data/zb.txt")).unwrap();
        let all = ["data/b.txt", "data/deep/a.txt", "data/deep/er/c.txt"];
        assert_eq!(found(dir.path(), "data/**/*.txt"), all);
        assert_eq!(found(dir.path(), "**/*.txt"), all);
        assert_eq!(found(dir.path(), "data/**"), all);
        assert_eq!(found(dir.path(), "data/**/er/**/*.txt"), all[2..]);
        // links in the pattern itself are followed
        assert_eq!(found(dir.path(), "data/z*.txt"), ["data/zb.txt"]);
        assert_eq!(found(dir.path(), "linked/*.txt"), ["linked/a.txt"]);
        assert_eq!(found(dir.path(), "link*/**/*.txt"), ["linked/a.txt", "linked/er/c.txt"]);
        // a wildcard in the first folder of an absolute path
        let path = dir.path().display().to_string();
        let pattern = format!("/[{}]{}/data/z*.txt", &path[1..2], &path[2..]);
        assert_eq!(found(dir.path(), &pattern), ["data/zb.txt"]);
        // a name in other than UTF-8, and hidden ones
        use std::os::unix::ffi::OsStrExt;
        for name in [&b"data/\xff.md"[..], b"data/.hidden.txt", b"data/deep/.h.txt"] {
            std::fs::write(dir.path().join(std::ffi::OsStr::from_bytes(name)), "x").unwrap();
        }
        assert_eq!(found(dir.path(), "data/z*.txt"), ["data/zb.txt"]);
        assert_eq!(found(dir.path(), "data/**/*.txt"), all);
    }

    #[test]
    fn the_kind_of_a_file_follows_from_its_name() {
        let of = |name: &str| kind(Path::new(name));
        assert_eq!(of("a/b.jsonl"), Some((Kind::Lines, None)));
        assert_eq!(of("a/b.c.JSON"), Some((Kind::Array, None)));
        assert_eq!(of("b.csv.gz"), Some((Kind::Table(b','), Some(Compression::Gzip))));
        assert_eq!(of("b.tsv.zst"), Some((Kind::Table(b'\t'), Some(Compression::Zstd))));
        assert_eq!(of("b.parquet"), Some((Kind::Parquet, None)));
        assert_eq!(of("b.arrow"), Some((Kind::Arrow, None)));
        for other in ["b.parquet.gz", "b.arrow.gz", "b.gz", "b", ".jsonl", "b.md"] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
