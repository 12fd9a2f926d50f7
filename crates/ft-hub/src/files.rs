//! A repository on the hub and in the cache.

use std::path::{Path, PathBuf};

use super::error::Error;
use super::request::{Kind, Want};
use super::settings::Settings;
use ft_base::store::{INDEX, SINGLE, parse_index};

pub(super) const CONFIG: &str = "config.json";
pub(super) const TOKENIZER: &str = "tokenizer.json";
pub(super) const ADAPTER: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// A repository on the hub, at a revision.
#[derive(Clone, Debug)]
pub(super) struct Repository {
    /// Prefix of the cache folder: `models` or `datasets`.
    kind: &'static str,
    pub(super) owner: String,
    pub(super) name: String,
    pub(super) revision: String,
}

impl Repository {
    /// Validates `OWNER/NAME` (by the rules of `huggingface_hub`) and the revision, since both become path
    /// components.
    pub(super) fn parse(id: &str, revision: &str) -> Result<Repository, Error> {
        let plain = |part: &str| {
            !part.is_empty()
                && part.len() <= 96
                && !part.starts_with(['.', '-'])
                && !part.ends_with(['.', '-'])
                && !part.contains("..")
                && !part.contains("--")
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        };
        let (owner, name) = match id.split_once('/') {
            Some((owner, name)) if plain(owner) && plain(name) && !name.ends_with(".git") => (owner, name),
            _ => {
                return Err(Error::BadName {
                    what: "hub id",
                    text: id.to_string(),
                    rule: "it is OWNER/NAME, of letters, digits, `.`, `_` and `-`, without `--`, `..` \
                        or `.git`, and without `.` or `-` at either end",
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
        let (owner, name) = (owner.to_string(), name.to_string());
        Ok(Repository { kind: "models", owner, name, revision: revision.to_string() })
    }

    /// Turns the repository into a dataset repository.
    pub(super) fn of_datasets(self) -> Self {
        Self { kind: "datasets", ..self }
    }

    pub(super) fn is_dataset(&self) -> bool {
        self.kind == "datasets"
    }

    pub(super) fn id(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// The error for a file that the cache lacks offline.
    pub(super) fn not_cached(&self, settings: &Settings, file: String) -> Error {
        let option = if self.is_dataset() { " --repo-type dataset" } else { "" };
        let (id, revision, cache) = (self.id(), self.revision.clone(), settings.cache.clone());
        Error::NotCached { id, revision, file, option, cache }
    }

    /// The error for a file that the hub lacks.
    #[cfg(feature = "hub")]
    pub(super) fn no_file(&self, file: &str, hint: impl Into<String>) -> Error {
        let (id, revision) = (self.id(), self.revision.clone());
        Error::NoHubFile { id, revision, file: file.into(), hint: hint.into() }
    }

    /// Cache folder of the repository.
    pub(super) fn folder(&self, settings: &Settings) -> PathBuf {
        settings.cache.join(format!("{}--{}--{}", self.kind, self.owner, self.name))
    }

    /// Lock file of downloads, beside the locks of `huggingface_hub`.
    #[cfg(feature = "hub")]
    pub(super) fn lock(&self, settings: &Settings) -> PathBuf {
        let folder = self.folder(settings);
        settings.cache.join(".locks").join(folder.file_name().unwrap_or_default()).join("ft.lock")
    }

    pub(super) fn snapshot(&self, settings: &Settings, commit: &str) -> PathBuf {
        self.folder(settings).join("snapshots").join(commit)
    }

    /// Marker file for a file absent from a commit, as in `huggingface_hub`.
    pub(super) fn absent(&self, settings: &Settings, commit: &str, file: &str) -> PathBuf {
        self.folder(settings).join(".no_exist").join(commit).join(file)
    }

    /// Whether the cache says that a commit lacks a file.
    pub(super) fn is_absent(&self, settings: &Settings, commit: &str, file: &str) -> bool {
        self.absent(settings, commit, file).exists()
    }

    /// File with the commit of this revision.
    pub(super) fn reference(&self, settings: &Settings) -> PathBuf {
        self.folder(settings).join("refs").join(&self.revision)
    }

    /// The commit that this revision has in the cache.
    pub(super) fn cached_commit(&self, settings: &Settings) -> Option<String> {
        if is_commit(&self.revision) {
            return Some(self.revision.clone());
        }
        let path = self.reference(settings);
        let text = ft_base::store::read_plain_text(&path, ft_base::store::LARGEST).ok()?;
        Some(text.trim().to_string()).filter(|c| is_commit(c))
    }

    /// Returns the cached snapshot and commit of this revision if complete, else the first missing file.
    pub(super) fn cached(&self, settings: &Settings, kind: Kind) -> Result<(PathBuf, String), String> {
        let first = match kind {
            Kind::Model(_) => CONFIG,
            Kind::Adapter => ADAPTER[0],
        };
        let commit = self.cached_commit(settings).ok_or(first)?;
        let dir = self.snapshot(settings, &commit);
        // `is_file` follows links, so dangling links to blobs do not count.
        let needs = |file: &str| if dir.join(file).is_file() { Ok(()) } else { Err(file.to_string()) };
        match kind {
            Kind::Adapter => ADAPTER.into_iter().try_for_each(needs)?,
            Kind::Model(want) => {
                needs(CONFIG)?;
                if want >= Want::Tokenizer && !self.is_absent(settings, &commit, TOKENIZER) {
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

/// Whether a revision is a full commit hash.
pub(super) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The shards named in a folder's index, sorted.
pub(super) fn shards(dir: &Path) -> Result<Vec<String>, String> {
    let bytes =
        ft_base::store::read_plain(&dir.join(INDEX), ft_base::store::LARGEST).map_err(|e| e.to_string())?;
    let mut files: Vec<String> = parse_index(&bytes)?.into_values().collect();
    files.sort();
    files.dedup();
    Ok(files)
}
