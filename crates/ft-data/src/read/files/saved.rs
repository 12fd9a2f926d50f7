//! Folders that `save_to_disk` of the datasets package wrote: Arrow files, listed by `state.json`. A folder of several
//! splits has one such folder for each, listed by `dataset_dict.json`.

use crate::error::Error;
use ft_base::store::{self, json};
use serde_json::Value;
use std::path::{Path, PathBuf};

const SPLITS: &str = "dataset_dict.json";
const STATE: &str = "state.json";
/// Largest of these two files, in bytes.
const LARGEST: u64 = 16 << 20;
/// Hint for folders of old versions.
const AGAIN: &str = "\n  hint: load it, and save it again by datasets 2 or later, or as Parquet";

/// Whether a folder was written by `save_to_disk`.
pub(super) fn is_saved(folder: &Path) -> bool {
    [SPLITS, STATE].iter().any(|name| folder.join(name).is_file())
}

/// The data files of a folder in the order of its rows, and a warning about columns.
///
/// # Errors
/// Unknown and missing splits, orders of rows that are not read, files outside of the folder.
pub(super) fn files(
    source: &ft_recipe::Source,
    folder: &Path,
) -> Result<(Vec<PathBuf>, Option<String>), Error> {
    let split = source.slice().0;
    let told = |file: &Path, why: String| Error::recipe(source, format!("{}: {why}", file.display()));
    let list = folder.join(SPLITS);
    if list.is_file() {
        let splits = names(&object(&list)?, "splits", None).map_err(|why| told(&list, why))?;
        let beside = source.source.trim_end_matches('/');
        let several = || format!("split = one of {}, or source = \"{beside}/SPLIT\"", splits.join(", "));
        let name = match (split, splits.as_slice()) {
            (Some(split), _) if splits.iter().any(|s| s == split) => split,
            (Some(split), _) => {
                return Err(told(&list, format!("it has no split {split:?}\n  hint: {}", several())));
            }
            (None, [one]) => one,
            (None, _) => return Err(told(&list, format!("it has several splits\n  hint: {}", several()))),
        };
        return of_split(source, &folder.join(name));
    }
    let file = folder.join(STATE);
    let own = object(&file)?.get("_split").and_then(Value::as_str).unwrap_or("train").to_string();
    match split {
        Some(split) if split != own && split != "train" => {
            Err(told(&file, format!("it holds the split {own:?}, not {split:?}")))
        }
        _ => of_split(source, folder),
    }
}

/// The data files of a folder of one split.
fn of_split(source: &ft_recipe::Source, folder: &Path) -> Result<(Vec<PathBuf>, Option<String>), Error> {
    let file = folder.join(STATE);
    let state = object(&file)?;
    let told = |why: String| Error::recipe(source, format!("{}: {why}", file.display()));
    for key in ["_indices_files", "_indices_data_files"] {
        if state.get(key).and_then(Value::as_array).is_some_and(|files| !files.is_empty()) {
            return Err(told(format!("{key} gives the rows another order, which ft does not read{AGAIN}")));
        }
    }
    let data = state.get("_data_files").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    if let Some(key) = ["skip", "take"].iter().find(|key| data.iter().any(|f| f.get(**key).is_some())) {
        return Err(told(format!("{key} selects rows of a data file, which ft does not read{AGAIN}")));
    }
    let files = names(&state, "_data_files", Some("filename")).map_err(told)?;
    if files.is_empty() {
        return Err(told("it lists no data files".into()));
    }
    let shown = state.get("_format_columns").and_then(Value::as_array).map(|columns| {
        format!(
            "{}: _format_columns shows the columns {} only; all columns are read",
            file.display(),
            Value::from(columns.as_slice())
        )
    });
    Ok((files.into_iter().map(|name| folder.join(name)).collect(), shown))
}

fn object(file: &Path) -> Result<Value, Error> {
    let invalid = |why: String| Error::read(file, std::io::Error::new(std::io::ErrorKind::InvalidData, why));
    let text = store::read_given(file, LARGEST).map_err(|e| Error::read(file, e))?;
    let value = json::value(&text).map_err(|e| invalid(json::describe(&e, "not JSON")))?;
    if value.is_object() { Ok(value) } else { Err(invalid("it holds no object".into())) }
}

/// Names of files or folders in a list of a file in the same folder, as strings or as `inner` of objects.
fn names(of: &Value, key: &str, inner: Option<&str>) -> Result<Vec<String>, String> {
    let list = of.get(key).and_then(Value::as_array).ok_or_else(|| format!("{key} is no list"))?;
    let name = |entry: &Value| {
        let name = inner.map_or(Some(entry), |inner| entry.get(inner)).and_then(Value::as_str);
        let plain =
            |name: &&str| !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0']);
        name.filter(plain)
            .map(str::to_string)
            .ok_or_else(|| format!("{key} lists {entry}, which is no name in its folder"))
    };
    list.iter().map(name).collect()
}
