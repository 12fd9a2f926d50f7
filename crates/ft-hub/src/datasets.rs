//! Datasets on the hub: selects the files of a config and split by the rules of the `datasets` package.

use super::error::Error;
use super::files::{Repository, is_commit};
use super::remote::download_dataset;
use super::request::{DatasetFiles, DatasetName, Layout};
use super::settings::Settings;
use ft_base::store;
use ft_base::terminal::plural;
use ft_data::{is_data, splits};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;

/// Values in the configs of a card at the most: cards have up to thousands of configs, with several splits each.
const MOST_VALUES: usize = 500_000;

/// Files by split.
type Splits = BTreeMap<String, Vec<String>>;

/// Files of a config, and files in its folder that names alone leave out.
#[derive(Default)]
struct Config {
    splits: Splits,
    left_out: Vec<String>,
}

/// The files of a config and split, and a message about files left out.
type Chosen = (Vec<String>, Option<String>);

/// Downloads the files of a dataset to the hub cache. `kept` is a folder for layouts, used offline; without the files
/// of a layout, those that another program has downloaded.
///
/// # Errors
/// As [`super::fetch_model`]; an unknown config or split, listing the available ones.
pub fn fetch_dataset_with(
    settings: &Settings,
    kept: Option<&Path>,
    name: DatasetName<'_>,
    progress: bool,
) -> Result<DatasetFiles, Error> {
    let repository = Repository::parse(name.id, name.revision)?.of_datasets();
    if !cfg!(feature = "hub") {
        return Err(Error::WithoutHub { id: repository.id() });
    }
    let place = kept.map(|dir| dir.join("datasets").join(key(settings, &repository)));
    let known: Option<Layout> =
        place.as_ref().and_then(|p| serde_json::from_slice(&store::read_plain(p, store::LARGEST).ok()?).ok());
    // Another program may have downloaded another commit, a later one if since: it writes the revision's file in
    // `refs`, as ft does not for datasets.
    let is_other =
        |layout: &Layout| repository.cached_commit(settings).is_some_and(|commit| commit != layout.commit);
    let is_later = || {
        let written = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
        written(&repository.reference(settings)) > place.as_deref().and_then(written)
    };
    let cached = || match &known {
        None => downloaded(settings, &repository, name),
        Some(layout) => match in_cache(settings, &repository, layout, name) {
            Ok(Some(found)) => Ok(Some(found)),
            of_layout if is_other(layout) && (of_layout.is_ok() || is_later()) => {
                let found = downloaded(settings, &repository, name).ok().flatten();
                found.map_or(of_layout, |found| Ok(Some(found)))
            }
            of_layout => of_layout,
        },
    };
    if settings.offline {
        return cached()?.ok_or_else(|| repository.not_cached(settings, "a file of rows".into()));
    }
    if is_commit(name.revision)
        && known.is_some()
        && let Ok(Some(found)) = cached()
    {
        return Ok(found);
    }
    let chosen = |layout: &Layout| choose(&repository, layout, name).map(|(files, _)| files);
    match download_dataset(settings, &repository, &chosen, progress) {
        Ok((layout, files)) => {
            if let Some(place) = &place {
                // best effort: without the layout, an offline run goes by the files in the cache
                let _ = store::write_atomic(place, &serde_json::to_vec(&layout).unwrap_or_default());
            }
            let notes = choose(&repository, &layout, name)?.1.into_iter().collect();
            Ok(DatasetFiles { files, notes })
        }
        Err(e) if e.allows_cache() => match cached() {
            Ok(Some(mut found)) => {
                found.notes.insert(0, format!("{e}\nusing {} from the cache", name.id));
                Ok(found)
            }
            _ => Err(e),
        },
        Err(e) => Err(e),
    }
}

/// The files of a layout in the cache, if all are there.
fn in_cache(
    settings: &Settings,
    repository: &Repository,
    layout: &Layout,
    name: DatasetName<'_>,
) -> Result<Option<DatasetFiles>, Error> {
    let dir = repository.snapshot(settings, &layout.commit);
    let (chosen, note) = choose(repository, layout, name)?;
    let size = |file: &String| layout.files.iter().find(|(n, _)| n == file).map(|(_, s)| *s);
    let whole = |file: &String| std::fs::metadata(dir.join(file)).ok().map(|m| m.len()) == size(file);
    let files = || chosen.iter().map(|f| dir.join(f)).collect();
    Ok(chosen.iter().all(whole).then(|| DatasetFiles { files: files(), notes: note.into_iter().collect() }))
}

/// The files of a dataset that another program (`hf download`) has put into the cache. Which ones the hub has is not
/// known; the numbers of shards are checked.
fn downloaded(
    settings: &Settings,
    repository: &Repository,
    name: DatasetName<'_>,
) -> Result<Option<DatasetFiles>, Error> {
    let Some(commit) = repository.cached_commit(settings) else { return Ok(None) };
    let dir = repository.snapshot(settings, &commit);
    let mut files = Vec::new();
    list(&dir, "", &mut files);
    if files.is_empty() {
        return Ok(None);
    }
    files.sort();
    let fail = |message: String| Error::NoSuchPart {
        id: repository.id(),
        message: format!("in the cache {}, {message}", dir.display()),
    };
    let bad_card = |why: String| fail(format!("README.md: {why}"));
    let configs = match store::read_plain_text(&dir.join("README.md"), store::LARGEST) {
        Ok(card) => card_configs(&card).map_err(bad_card)?,
        Err(e) if e.kind() == ErrorKind::NotFound && name.config.is_none() => Value::Null,
        Err(e) => return Err(bad_card(e.to_string())),
    };
    let layout = Layout { commit, files, configs };
    let (chosen, left_out) = choose(repository, &layout, name).map_err(|e| match e {
        Error::NoSuchPart { message, .. } => fail(message),
        e => e,
    })?;
    if let Some(shard) = missing_shard(&layout.files, &chosen) {
        return Err(repository.not_cached(settings, shard));
    }
    let note = format!(
        "using the files of {} in the cache, at commit {}: whether these are all cannot be known offline",
        name.id, layout.commit
    );
    let notes = std::iter::once(note).chain(left_out).collect();
    Ok(Some(DatasetFiles { files: chosen.iter().map(|f| dir.join(f)).collect(), notes }))
}

/// Adds the files below a folder, with their sizes.
fn list(dir: &Path, prefix: &str, out: &mut Vec<(String, u64)>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            list(&entry.path(), &format!("{name}/"), out);
        } else if let Ok(file) = std::fs::metadata(entry.path())
            && file.is_file()
        {
            out.push((name, file.len()));
        }
    }
}

/// The name of shards like a chosen one, `NAME-*-of-00002.parquet`, of which some are not there. A hash after the
/// total, another one in each name, does not count.
fn missing_shard(files: &[(String, u64)], chosen: &[String]) -> Option<String> {
    /// Name, total and ending of a shard.
    type Parts<'a> = (&'a str, &'a str, &'a str);
    /// Also the number of the shard.
    fn parts(file: &str) -> Option<(Parts<'_>, &str)> {
        let (left, right) = file.rsplit_once("-of-")?;
        let (total, rest) = right.split_at(right.bytes().take_while(u8::is_ascii_digit).count());
        let (name, number) = left.rsplit_once('-')?;
        Some(((name, total, rest.find('.').map_or("", |at| &rest[at..])), number))
    }
    let mut numbers: BTreeMap<Parts<'_>, BTreeSet<&str>> = BTreeMap::new();
    for (of, number) in files.iter().filter_map(|(f, _)| parts(f)) {
        numbers.entry(of).or_default().insert(number);
    }
    let lacks = |of: &Parts<'_>| {
        of.1.parse().is_ok_and(|total: usize| numbers.get(of).is_none_or(|there| there.len() != total))
    };
    let (name, total, ending) = chosen.iter().filter_map(|f| Some(parts(f)?.0)).find(lacks)?;
    Some(format!("{name}-*-of-{total}{ending}"))
}

/// `configs` in the metadata of a dataset card; null without any.
///
/// # Errors
/// YAML that cannot be read, with the line of the card.
fn card_configs(card: &str) -> Result<Value, String> {
    let lines = card.trim_start_matches('\u{feff}').lines().enumerate();
    let mut lines = lines.skip_while(|(_, l)| l.trim().is_empty());
    if lines.next().is_none_or(|(_, l)| l.trim_end() != "---") {
        return Ok(Value::Null);
    }
    let metadata = lines.take_while(|(_, l)| l.trim_end() != "---");
    // the key alone: cards may have more values than the reader takes
    let mut own = metadata.skip_while(|(_, l)| !l.starts_with("configs:"));
    let Some((above, first)) = own.next() else { return Ok(Value::Null) };
    let rest = own.map(|(_, l)| l).take_while(|l| l.trim().is_empty() || l.starts_with([' ', '-', '#']));
    let text: Vec<&str> = std::iter::once(first).chain(rest).collect();
    // empty lines above keep the numbers of lines
    let mut table = ft_recipe::yaml_value(&("\n".repeat(above) + &text.join("\n")), MOST_VALUES)?;
    Ok(table.get_mut("configs").map(Value::take).unwrap_or_default())
}

/// File name of a cached layout.
fn key(settings: &Settings, r: &Repository) -> String {
    let text = format!("{}\n{}\n{}", settings.cache.display(), r.id(), r.revision);
    blake3::hash(text.as_bytes()).to_hex()[..32].to_string()
}

/// Selects the files of a config and split.
fn choose(repository: &Repository, layout: &Layout, name: DatasetName<'_>) -> Result<Chosen, Error> {
    let fail = |message: String| Error::NoSuchPart { id: repository.id(), message };
    let data: Vec<&str> = layout.files.iter().map(|(n, _)| n.as_str()).filter(|n| is_plain(n)).collect();
    let (configs, default) = configs(&layout.configs, &data).map_err(fail)?;
    let default = Some(default.as_str()).filter(|name| configs.contains_key(*name));
    let Config { splits, left_out } = part(&configs, "config", name.config.or(default)).map_err(fail)?;
    if name.split.is_none() && splits.is_empty() {
        return Err(fail(
            "it has no files that hold rows (a script may build it)\nhint: download its rows, and name the files"
                .into(),
        ));
    }
    let mut files = part(splits, "split", name.split).map_err(fail)?.clone();
    files.sort();
    files.dedup();
    let note = left_out.first().map(|first| {
        let files = plural(left_out.len(), "file");
        format!("not read of {}, by name or type: {files} (the first: {first})", repository.id())
    });
    Ok((files, note))
}

/// The part `name` of a dataset, else its only one; `kind` is the recipe's key.
fn part<'a, T>(all: &'a BTreeMap<String, T>, kind: &str, name: Option<&str>) -> Result<&'a T, String> {
    let names = || all.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    match (name, all.first_key_value()) {
        (Some(name), _) => {
            all.get(name).ok_or_else(|| format!("it has no {kind} {name:?}\nhint: it has {}", names()))
        }
        (None, Some((_, only))) if all.len() == 1 => Ok(only),
        (None, _) => Err(format!("it has several {kind}s\nhint: {kind} = one of {}", names())),
    }
}

/// Whether a repository file may contain rows. Paths become cache paths, so unusual ones are ignored.
fn is_plain(path: &str) -> bool {
    let plain = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains(['\\', '\0']);
    path.split('/').all(plain) && is_data(Path::new(path))
}

/// The configs from the dataset card, else a single config derived from file names; and the name of the default
/// config, `default` unless the card marks one.
fn configs(card: &Value, data: &[&str]) -> Result<(BTreeMap<String, Config>, String), String> {
    let (mut out, mut default) = (BTreeMap::new(), "default".to_string());
    for config in card.as_array().into_iter().flatten() {
        let text = |key: &str| config.get(key).and_then(Value::as_str);
        let name = text("config_name").unwrap_or("default");
        let folder = text("data_dir").map(|d| d.trim_start_matches("./").trim_matches('/'));
        let folder = folder.filter(|d| !matches!(*d, "" | ".")).map(|d| format!("{d}/")).unwrap_or_default();
        let inside: Vec<&str> = data.iter().copied().filter(|f| f.starts_with(&folder)).collect();
        let found = match config.get("data_files") {
            None => by_name(&inside),
            Some(files) => Config { splits: listed(files, &folder, &inside)?, left_out: Vec::new() },
        };
        if config.get("default") == Some(&true.into()) {
            default = name.to_string();
        }
        out.insert(name.to_string(), found);
    }
    if out.is_empty() {
        out.insert(default.clone(), by_name(data));
    }
    Ok((out, default))
}

/// The splits of `data_files` in a card: patterns, or tables of split and patterns.
fn listed(files: &Value, folder: &str, data: &[&str]) -> Result<Splits, String> {
    let mut out = Splits::new();
    let mut add = |split: &str, patterns: &Value| -> Result<(), String> {
        let patterns: Vec<&str> = match patterns {
            Value::String(one) => vec![one],
            Value::Array(many) => many.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let options = glob::MatchOptions { require_literal_separator: true, ..glob::MatchOptions::new() };
        for text in patterns {
            let pattern = glob::Pattern::new(&format!("{}{text}", glob::Pattern::escape(folder)))
                .map_err(|e| format!("its card has the pattern {text:?}: {e}"))?;
            let found = data.iter().filter(|f| pattern.matches_with(f, options));
            out.entry(split.to_string()).or_default().extend(found.map(|f| f.to_string()));
        }
        Ok(())
    };
    match files {
        Value::Object(splits) => splits.iter().try_for_each(|(split, p)| add(split, p))?,
        Value::Array(list) if list.iter().any(Value::is_object) => {
            for entry in list {
                let split = entry.get("split").and_then(Value::as_str).unwrap_or("train");
                add(split, entry.get("path").unwrap_or(&Value::Null))?;
            }
        }
        other => add("train", other)?,
    }
    out.retain(|_, files| !files.is_empty());
    Ok(out)
}

/// Derives splits from the names of files of the most frequent type. By default, all of them belong to `train`.
fn by_name(data: &[&str]) -> Config {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    data.iter().for_each(|f| *counts.entry(row_type(f)).or_default() += 1);
    let most = counts.iter().max_by_key(|(k, n)| (**n, *k == "parquet")).map(|(k, _)| k);
    let Some(most) = most else { return Config::default() };
    let same: Vec<&str> = data.iter().copied().filter(|f| row_type(f) == *most).collect();
    let mut by_split = splits(&same, "data/");
    if by_split.is_empty() {
        by_split.insert("train".to_string(), same.iter().map(|f| f.to_string()).collect());
    }
    let read: BTreeSet<&str> = by_split.values().flatten().map(String::as_str).collect();
    let left_out = data.iter().filter(|f| !read.contains(*f)).map(|f| f.to_string()).collect();
    Config { splits: by_split, left_out }
}

/// The type of rows in a file, as its last extension, compressed or not; of JSON in any form, `json`.
fn row_type(path: &str) -> String {
    let lower = path.to_lowercase();
    let name = [".gz", ".zst"].iter().find_map(|end| lower.strip_suffix(*end)).unwrap_or(&lower);
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    if matches!(extension, "jsonl" | "ndjson") { "json".into() } else { extension.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn choice(
        files: &[&str],
        configs: Value,
        config: Option<&str>,
        split: Option<&str>,
    ) -> Result<Chosen, String> {
        let files = files.iter().map(|f| (f.to_string(), 1)).collect();
        let layout = Layout { commit: String::new(), files, configs };
        let repository = Repository::parse("owner/name", "main").map_err(|e| e.to_string())?;
        let name = DatasetName { id: "owner/name", revision: "main", config, split };
        choose(&repository, &layout, name).map_err(|e| e.to_string())
    }

    fn chosen(
        files: &[&str],
        configs: Value,
        config: Option<&str>,
        split: Option<&str>,
    ) -> Result<Vec<String>, String> {
        choice(files, configs, config, split).map(|(files, _)| files)
    }

    #[test]
    fn configs_of_a_card_are_those_of_its_metadata() -> Result<(), String> {
        let card = "---\nlicense: mit\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    \
                    path: \"rows/train-*\"\n# more\n- config_name: other\n  default: true\nsize: 1\n---\n# Rows\n";
        let wanted = json!([
            {"config_name": "main", "data_files": [{"split": "train", "path": "rows/train-*"}]},
            {"config_name": "other", "default": true},
        ]);
        assert_eq!(card_configs(card)?, wanted);
        for none in ["", "# Rows", "---\nlicense: mit\n---\nconfigs:\n", "---\nconfigs:x\n---"] {
            assert_eq!(card_configs(none)?, Value::Null, "{none:?}");
        }
        let error = card_configs("---\nlicense: mit\n\nconfigs:\n- *x\n---\n").unwrap_err();
        assert!(error.starts_with("line 5: "), "{error}");
        Ok(())
    }

    #[test]
    fn cards_may_have_thousands_of_configs() -> Result<(), String> {
        let config = |i| {
            format!(
                "- config_name: c{i}\n  data_files:\n  - split: train\n    path: c{i}/train-*\n  \
                     - split: test\n    path: c{i}/test-*\n"
            )
        };
        let card = format!("---\nconfigs:\n{}---\n", (0..4000).map(config).collect::<String>());
        assert_eq!(card_configs(&card)?.as_array().map(Vec::len), Some(4000));
        Ok(())
    }

    #[test]
    fn missing_shards_are_found_by_their_numbers() {
        let find = |files: &[&str]| {
            let all: Vec<(String, u64)> = files.iter().map(|f| (f.to_string(), 1)).collect();
            missing_shard(&all, &[files[0].to_string()])
        };
        assert_eq!(find(&["a-00001-of-00002.parquet", "a-00000-of-00002.parquet", "b-0-of-9.parquet"]), None);
        assert_eq!(find(&["a-1-of-1.jsonl.gz", "a-1-of-2.jsonl"]), None);
        assert_eq!(find(&["rows.jsonl", "part-of-it.jsonl"]), None);
        let missing = find(&["d/a-00001-of-00002.parquet", "d/b-00000-of-00002.parquet"]);
        assert_eq!(missing.as_deref(), Some("d/a-*-of-00002.parquet"));
        // names with hashes
        let hashed =
            ["d/a-00000-of-00002-a3ecf92756993583.parquet", "d/a-00001-of-00002-4f1e0b6c7d829a35.parquet"];
        assert_eq!(find(&hashed), None);
        assert_eq!(find(&hashed[1..]).as_deref(), Some("d/a-*-of-00002.parquet"));
        // the same shards in another kind of file
        assert_eq!(find(&["d/a-00000-of-00001.parquet", "d/a-00000-of-00001.jsonl"]), None);
        // of two uploads
        assert_eq!(find(&["d/a-00000-of-00001-a3.parquet", "d/a-00000-of-00001-4f.parquet"]), None);
    }

    #[test]
    fn files_name_their_splits() {
        let shards = [
            "README.md",
            "data/train_sft-00000-of-00002-a3ecf92756993583.parquet",
            "data/train_sft-00001-of-00002-4f1e0b6c7d829a35.parquet",
            "data/test_sft-00000-of-00001.parquet",
            "dataset_infos.json",
        ];
        assert_eq!(chosen(&shards, Value::Null, None, Some("test_sft")), Ok(vec![shards[3].into()]));
        assert_eq!(chosen(&shards, Value::Null, None, Some("train_sft")).map(|f| f.len()), Ok(2));
        let several = chosen(&shards, Value::Null, None, None).unwrap_err();
        assert!(several.contains("split = one of test_sft, train_sft"), "{several}");
        let parts = ["data/part-1-of-2.jsonl", "data/part-2-of-2.jsonl"];
        assert_eq!(chosen(&parts, Value::Null, None, Some("train")).map(|f| f.len()), Ok(2));
        let words =
            ["my_train.jsonl", "dev/rows.jsonl", "x-test.jsonl", ".hidden/train.jsonl", "../train.jsonl"];
        assert_eq!(chosen(&words, Value::Null, None, Some("validation")), Ok(vec!["dev/rows.jsonl".into()]));
        assert_eq!(chosen(&words, Value::Null, None, Some("train")), Ok(vec!["my_train.jsonl".into()]));
        assert_eq!(
            chosen(&["alpaca.json", "LICENSE.txt"], Value::Null, None, None),
            Ok(vec!["alpaca.json".into()])
        );
        let script = chosen(&["name.py", "README.md"], Value::Null, None, None).unwrap_err();
        assert!(script.contains("no files that hold rows"), "{script}");
    }

    /// As in `datasets`, JSON in any form is one type; files of another are told.
    #[test]
    fn the_last_extension_is_the_type_of_a_file() {
        let told = |files: &[&str]| choice(files, Value::Null, None, None).unwrap();
        let parts = ["a.csv", "part.0.jsonl", "part.1.json.gz", "v1.2.ndjson"];
        let (files, note) = told(&parts);
        assert_eq!(files, parts[1..]);
        assert!(note.unwrap().ends_with("1 file (the first: a.csv)"));
        assert_eq!(told(&parts[1..]).1, None);
        let tie = ["b.1.jsonl", "c.0.parquet"];
        assert_eq!(told(&tie).0, tie[1..]);
        let rest = ["a.jsonl", "data/train-00000-of-00001.jsonl"];
        assert_eq!(told(&rest).0, rest[1..]);
        assert!(told(&rest).1.unwrap().ends_with("1 file (the first: a.jsonl)"));
    }

    #[test]
    fn cards_name_configs_and_splits() {
        let files =
            ["main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet", "socratic/a.parquet"];
        let card = json!([
            {"config_name": "main", "data_files": [
                {"split": "train", "path": "main/train-*"}, {"split": "test", "path": ["main/test-*"]}]},
            {"config_name": "socratic", "data_files": "socratic/*.parquet"},
        ]);
        let ask = |config, split| chosen(&files, card.clone(), config, split);
        assert_eq!(ask(Some("main"), Some("test")), Ok(vec![files[1].into()]));
        assert_eq!(ask(Some("socratic"), None), Ok(vec![files[2].into()]));
        assert!(ask(None, None).unwrap_err().contains("config = one of main, socratic"));
        assert!(ask(Some("other"), None).unwrap_err().contains("it has main, socratic"));
        assert!(ask(Some("main"), Some("dev")).unwrap_err().contains("it has test, train"));
        let folder = json!([{"config_name": "x", "data_dir": "main", "default": true}]);
        assert_eq!(chosen(&files, folder, None, Some("train")), Ok(vec![files[0].into()]));
        for root in ["", "/", ".", "./"] {
            let all = json!([{"config_name": "x", "data_dir": root, "data_files": "main/train-*"}]);
            assert_eq!(chosen(&files, all, None, None), Ok(vec![files[0].into()]), "{root:?}");
        }
        let marked = json!([
            {"config_name": "socratic", "data_dir": "socratic", "default": true},
            {"config_name": "main", "data_dir": "main"},
        ]);
        for config in [None, Some("socratic")] {
            assert_eq!(chosen(&files, marked.clone(), config, None), Ok(vec![files[2].into()]));
        }
        assert!(chosen(&files, marked, Some("default"), None).unwrap_err().contains("it has main, socratic"));
    }
}
