//! Which files of a repository are needed, and whether the cache has them.

use std::path::{Path, PathBuf};

use super::{Error, Settings, Want};
use crate::store::{INDEX, SINGLE, is_pickle_name, parse_index};

/// What is fetched: a model, up to a point, or an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Model(Want),
    Adapter,
}

pub(super) const CONFIG: &str = "config.json";
pub(super) const TOKENIZER: &str = "tokenizer.json";
pub(super) const ADAPTER: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];
const WITH_CONFIG: [&str; 1] = ["generation_config.json"];
const WITH_TOKENIZER: [&str; 6] = [
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "added_tokens.json",
];

/// A repository on the hub, at a revision.
#[derive(Clone, Debug)]
pub(super) struct Repository {
    pub(super) owner: String,
    pub(super) name: String,
    pub(super) revision: String,
}

impl Repository {
    /// Checks the spelling of `OWNER/NAME` and of the revision: both become parts of paths.
    pub(super) fn parse(id: &str, revision: &str) -> Result<Repository, Error> {
        let plain = |part: &str| {
            !part.is_empty()
                && part.len() <= 96
                && !part.starts_with(['.', '-'])
                && !part.contains("..")
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        };
        let (owner, name) = match id.split_once('/') {
            Some((owner, name)) if plain(owner) && plain(name) => (owner, name),
            _ => {
                return Err(Error::BadName {
                    what: "hub id",
                    text: id.to_string(),
                    rule: "it is OWNER/NAME, of letters, digits, `.`, `_` and `-`",
                });
            }
        };
        let revision_is_plain = revision.split('/').all(|part| {
            !part.is_empty()
                && !part.starts_with('.')
                && !part.contains("..")
                && part.bytes().all(|b| b.is_ascii_graphic() && !b"\\:?*[~^\"<>|".contains(&b))
        });
        if !revision_is_plain {
            return Err(Error::BadName {
                what: "revision",
                text: revision.to_string(),
                rule: "it is a branch, a tag or a commit",
            });
        }
        Ok(Repository { owner: owner.to_string(), name: name.to_string(), revision: revision.to_string() })
    }

    pub(super) fn id(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// The repository's folder in the cache.
    pub(super) fn folder(&self, settings: &Settings) -> PathBuf {
        settings.cache.join(format!("models--{}--{}", self.owner, self.name))
    }

    pub(super) fn snapshot(&self, settings: &Settings, commit: &str) -> PathBuf {
        self.folder(settings).join("snapshots").join(commit)
    }

    /// The mark that a commit has no such file, as `huggingface_hub` keeps it.
    pub(super) fn absent(&self, settings: &Settings, commit: &str, file: &str) -> PathBuf {
        self.folder(settings).join(".no_exist").join(commit).join(file)
    }

    /// The snapshot of this revision in the cache, and its commit, if it has all that is needed;
    /// else the name of the first file that is missing.
    pub(super) fn cached(&self, settings: &Settings, kind: Kind) -> Result<(PathBuf, String), String> {
        let first = match kind {
            Kind::Model(_) => CONFIG,
            Kind::Adapter => ADAPTER[0],
        };
        let commit = if is_commit(&self.revision) {
            self.revision.clone()
        } else {
            let path = self.folder(settings).join("refs").join(&self.revision);
            let text = std::fs::read_to_string(path).map_err(|_| first.to_string())?;
            Some(text.trim().to_string()).filter(|c| is_commit(c)).ok_or(first.to_string())?
        };
        let dir = self.snapshot(settings, &commit);
        // `is_file` follows links: one to a blob that is gone does not count.
        let needs = |file: &str| match dir.join(file).is_file() {
            true => Ok(()),
            false => Err(file.to_string()),
        };
        match kind {
            Kind::Adapter => ADAPTER.into_iter().try_for_each(needs)?,
            Kind::Model(want) => {
                needs(CONFIG)?;
                if want >= Want::Tokenizer && !self.absent(settings, &commit, TOKENIZER).exists() {
                    needs(TOKENIZER)?;
                }
                if want >= Want::Weights && needs(SINGLE).is_err() {
                    needs(INDEX).map_err(|_| SINGLE.to_string())?;
                    shards(&dir).map_err(|_| INDEX.to_string())?.iter().try_for_each(|s| needs(s))?;
                }
            }
        }
        Ok((dir, commit))
    }
}

/// Whether a revision is a full commit hash, which never changes its meaning.
pub(super) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The shards that the index in a folder names, sorted.
pub(super) fn shards(dir: &Path) -> Result<Vec<String>, String> {
    let bytes = std::fs::read(dir.join(INDEX)).map_err(|e| e.to_string())?;
    let mut files: Vec<String> = parse_index(&bytes)?.into_values().collect();
    files.sort();
    files.dedup();
    Ok(files)
}

/// Of the files in the root of a repository, those to fetch. With a shard index among them, the
/// shards that it names come later, when it has been read.
///
/// # Errors
/// [`Error::NoHubFile`] for a file that must be there; [`Error::PickleOnly`].
pub(super) fn choose(
    repository: &Repository,
    listed: &[(String, u64)],
    kind: Kind,
) -> Result<Vec<String>, Error> {
    let has = |file: &str| listed.iter().any(|(name, _)| name == file);
    let missing = |file: &str, hint: String| Error::NoHubFile {
        id: repository.id(),
        revision: repository.revision.clone(),
        file: file.to_string(),
        hint,
    };
    let pickle = || listed.iter().map(|(name, _)| name).find(|name| is_pickle_name(name));
    let pickle_only = |file: &String| Error::PickleOnly { place: repository.id(), file: file.clone() };
    let mut wanted: Vec<&str> = Vec::new();
    match kind {
        Kind::Adapter => {
            for file in ADAPTER {
                if !has(file) {
                    return Err(match pickle() {
                        Some(pickle) if file == ADAPTER[1] => pickle_only(pickle),
                        _ if has(CONFIG) => {
                            missing(file, "; it has config.json: a model, not an adapter".into())
                        }
                        _ => missing(file, String::new()),
                    });
                }
            }
            wanted.extend(ADAPTER);
        }
        Kind::Model(want) => {
            if !has(CONFIG) {
                let hint = match has(ADAPTER[0]) {
                    true => "; it has adapter_config.json: an adapter, for lora.init",
                    false if listed.iter().any(|(n, _)| n.ends_with(".gguf")) => {
                        "; it has GGUF files: use the safetensors release of the model"
                    }
                    false => "",
                };
                return Err(missing(CONFIG, hint.to_string()));
            }
            wanted.push(CONFIG);
            wanted.extend(WITH_CONFIG.into_iter().filter(|f| has(f)));
            if want >= Want::Tokenizer {
                wanted.extend(WITH_TOKENIZER.into_iter().filter(|f| has(f)));
            }
            if want >= Want::Weights {
                // One of the two: some repositories keep the same weights again under other names.
                match [SINGLE, INDEX].into_iter().find(|f| has(f)) {
                    Some(file) => wanted.push(file),
                    None => {
                        return Err(match pickle() {
                            Some(file) => pickle_only(file),
                            None => missing(SINGLE, format!(" (nor {INDEX})")),
                        });
                    }
                }
            }
        }
    }
    Ok(wanted.into_iter().map(str::to_string).collect())
}
