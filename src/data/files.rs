//! The files of a source.

use super::error::Error;
use crate::recipe;
use std::path::{Path, PathBuf};

/// The files of a source, sorted by name.
///
/// # Errors
/// A source that is not there, or that holds no files of rows.
pub fn files(source: &recipe::Source, resolve: &dyn Fn(&str) -> PathBuf) -> Result<Vec<PathBuf>, Error> {
    let path = resolve(&source.source);
    let extension = |p: &Path| p.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
    let not_built = |what: &str| Err(Error::NotBuilt(format!("data source = {:?} ({what})", source.source)));
    let fail = |message: String| Err(Error::Recipe { place: source.place.clone(), message });
    let there = std::fs::metadata(&path);
    let Ok(there) = there else {
        let is_id = source.source.split('/').count() == 2
            && extension(&path).is_empty()
            && !source.source.starts_with(['.', '/', '~']);
        return if is_id || source.source.starts_with("hf://") {
            not_built("a dataset of the hub, and there is no such file or folder here")
        } else {
            Err(Error::Missing { source_name: source.source.clone(), path })
        };
    };
    for (key, value) in [("split", &source.split), ("config", &source.config)] {
        if let Some(value) = value {
            return fail(format!("{key} = {value:?} is for datasets of the hub; name a file of it instead"));
        }
    }
    let wanted = |p: &Path| matches!(extension(p).as_str(), "jsonl" | "json");
    if !there.is_dir() {
        return match extension(&path).as_str() {
            "parquet" => not_built("parquet files"),
            _ if wanted(&path) => Ok(vec![path]),
            _ => fail(format!("{:?} is neither .jsonl nor .json", source.source)),
        };
    }
    let cannot = |cause| Error::Read { path: path.clone(), cause };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&path).map_err(cannot)? {
        let file = entry.map_err(cannot)?.path();
        let hidden = file.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'));
        if hidden || file.is_dir() {
            continue;
        }
        if extension(&file) == "parquet" {
            return not_built("a folder with parquet files");
        }
        if wanted(&file) {
            found.push(file);
        }
    }
    found.sort();
    if found.is_empty() {
        let message = "the folder holds no .jsonl or .json file".into();
        return Err(Error::Empty { file: path.display().to_string(), message });
    }
    Ok(found)
}
