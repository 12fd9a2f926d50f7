//! Data files of a source, and file types.

mod saved;
pub(crate) mod splits;

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
    not_local(source, "config", source.config.as_deref())?;
    not_local(source, "revision", source.revision.as_deref())?;
    if there.is_dir() {
        return if saved::is_saved(&path) { saved::files(source, &path) } else { of_folder(source, &path) };
    }
    // the rows of a file are a split "train"
    not_local(source, "split", source.slice().0.filter(|name| *name != "train"))?;
    match kind(&path) {
        Some(_) => Ok(alone(vec![path])),
        None => fail(format!("{:?} is none of the files that hold rows: {KINDS}", source.source)),
    }
}

/// Refuses the value of a key for datasets of the hub.
fn not_local(source: &ft_recipe::Source, key: &str, value: Option<&str>) -> Result<(), Error> {
    value.map_or(Ok(()), |value| {
        let message = format!("{key} = {value:?} is for datasets of the hub; name a file of it instead");
        Err(Error::recipe(source, message))
    })
}

/// The data files of a folder, and a message about ignored entries. If names are of several splits, the files of the
/// source's split.
fn of_folder(source: &ft_recipe::Source, folder: &Path) -> Result<(Vec<PathBuf>, Option<String>), Error> {
    let cannot = |cause| Error::read(folder, cause);
    let (mut found, mut ignored) = (Vec::new(), Ignored::default());
    for entry in std::fs::read_dir(folder).map_err(cannot)? {
        let entry = entry.map_err(cannot)?;
        let (file, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        match (name.starts_with('.'), file.is_dir(), splits::is_data(&file)) {
            (true, ..) => ignored.hidden.push(name),
            (_, true, _) => ignored.folders.push(name),
            (_, _, false) => ignored.others.push(name),
            _ => found.push((file, name)),
        }
    }
    found.sort();
    if found.is_empty() {
        let message = format!("the folder holds none of the files that hold rows: {KINDS}");
        return Err(Error::Empty { file: folder.display().to_string(), message });
    }
    let names: Vec<&str> = found.iter().map(|(_, name)| name.as_str()).collect();
    let by_split = splits::splits(&names, "");
    let wanted = source.slice().0;
    if by_split.len() < 2 {
        // the rows of all files are a split "train"
        not_local(source, "split", wanted.filter(|name| *name != "train"))?;
    } else {
        let known = || by_split.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let chosen = wanted.and_then(|name| by_split.get(name)).ok_or_else(|| {
            let (at, ending) = (&source.source, names[0].rsplit('.').next().unwrap_or_default());
            let all = format!("{}/*.{ending}", at.trim_end_matches('/'));
            let what = wanted.map_or("several splits".into(), |name| format!("no split {name:?}"));
            let hint = format!("split = one of {}; a pattern takes all files: {all:?}", known());
            Error::recipe(source, format!("the folder {at:?} holds {what}\n  hint: {hint}"))
        })?;
        let of_some: HashSet<&str> = by_split.values().flatten().map(String::as_str).collect();
        let apart = names.into_iter().filter(|name| !of_some.contains(name));
        ignored.apart = apart.map(String::from).collect();
        let chosen: HashSet<&str> = chosen.iter().map(String::as_str).collect();
        found.retain(|(_, name)| chosen.contains(name.as_str()));
    }
    let files = found.into_iter().map(|(file, _)| file).collect();
    Ok((files, ignored.describe(&source.source)))
}

/// Ignored entries of a folder.
#[derive(Default)]
struct Ignored {
    folders: Vec<String>,
    hidden: Vec<String>,
    others: Vec<String>,
    /// Files of no split, in a folder with several.
    apart: Vec<String>,
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
            (self.apart, "file of no split", "files of no split"),
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
