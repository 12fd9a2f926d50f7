//! Splits of a dataset by file names, by the rules of the `datasets` package.

use super::holds_rows;
use std::collections::BTreeMap;
use std::path::Path;

/// Files without rows despite a matching extension.
const NO_ROWS: &[&str] = &[
    "dataset_info.json",
    "dataset_infos.json",
    "state.json",
    "requirements.txt",
    "license.txt",
    "readme.txt",
];
/// Path words that identify a split.
const SPLITS: &[(&str, &[&str])] = &[
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "val", "dev"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// Whether a file of a dataset may hold rows: by type, and no metadata by name.
pub fn is_data(path: &Path) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy().to_lowercase()).unwrap_or_default();
    holds_rows(path) && !NO_ROWS.contains(&name.as_str())
}

/// Files by split: by names of shards in `folder` (`data/`), `SPLIT-00000-of-00002` and anything behind; without any,
/// by words in the path. Files of no split are absent.
pub fn splits(files: &[&str], folder: &str) -> BTreeMap<String, Vec<String>> {
    let shard = |file: &str| of_shard(file.strip_prefix(folder)?);
    for rule in [&shard as &dyn Fn(&str) -> Option<String>, &of_word] {
        let mut out: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for file in files {
            if let Some(split) = rule(file) {
                out.entry(split).or_default().push(file.to_string());
            }
        }
        if !out.is_empty() {
            return out;
        }
    }
    BTreeMap::new()
}

/// The split in the name of a shard.
fn of_shard(name: &str) -> Option<String> {
    let (left, total) = name.rsplit_once("-of-")?;
    let (split, number) = left.rsplit_once('-')?;
    let digits = |n: &str| n.bytes().take_while(u8::is_ascii_digit).count();
    let is_shard = digits(number) == 5 && number.len() == 5 && digits(total) >= 5;
    (is_shard && !split.contains('/')).then(|| split.to_string())
}

/// The split identified by a word in the path.
fn of_word(path: &str) -> Option<String> {
    let lower = path.to_lowercase();
    let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphabetic()).collect();
    let found = SPLITS.iter().find(|(_, names)| words.iter().any(|w| names.contains(w)));
    found.map(|(split, _)| split.to_string())
}
