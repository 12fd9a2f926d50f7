//! Selection of the required files of a repository.

use super::error::Error;
use super::files::{ADAPTER, CONFIG, Repository, TOKENIZER};
use super::request::{Kind, Want};
use ft_base::store::{INDEX, SINGLE, is_pickle_name};
use ft_data::{CHAT_TEMPLATE, TOOL_USE};

const WITH_CONFIG: [&str; 1] = ["generation_config.json"];
/// Prompt format and chat templates of an adapter.
const WITH_ADAPTER: [&str; 3] = ["ft.json", CHAT_TEMPLATE, TOOL_USE];
/// Files that change tokens.
const WITH_TOKENIZER: [&str; 7] = [
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    CHAT_TEMPLATE,
    TOOL_USE,
    "chat_template.json",
    "added_tokens.json",
];
/// Files that change no tokens of a model: prompt format and processors.
const BESIDE_TOKENIZER: [&str; 4] =
    ["ft.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"];

/// Names of files that a repository may lack.
pub(super) fn optional(kind: Kind) -> Vec<&'static str> {
    let beside: &[_] = match kind {
        Kind::Adapter | Kind::Model(Want::Config) => &[],
        Kind::Model(_) => &BESIDE_TOKENIZER[..],
    };
    [&of_tokens(kind)[..], beside].concat()
}

/// Names of files that a repository may lack, and that change tokens.
pub(super) fn of_tokens(kind: Kind) -> Vec<&'static str> {
    match kind {
        Kind::Adapter => WITH_ADAPTER.to_vec(),
        Kind::Model(Want::Config) => WITH_CONFIG.to_vec(),
        Kind::Model(_) => [&WITH_CONFIG[..], &WITH_TOKENIZER[..]].concat(),
    }
}

/// Selects files of a repository. The shards of a selected shard index are added later.
///
/// # Errors
/// [`Error::NoHubFile`] for a missing required file; [`Error::PickleOnly`].
pub(super) fn choose(
    repository: &Repository,
    listed: &[(String, u64)],
    kind: Kind,
) -> Result<Vec<String>, Error> {
    let listing = Listing { repository, listed };
    let wanted = match kind {
        Kind::Adapter => listing.adapter()?,
        Kind::Model(want) => listing.model(want)?,
    };
    Ok(wanted.into_iter().map(str::to_string).collect())
}

/// The files of a repository.
struct Listing<'a> {
    repository: &'a Repository,
    /// Names and sizes.
    listed: &'a [(String, u64)],
}

impl Listing<'_> {
    fn has(&self, file: &str) -> bool {
        self.listed.iter().any(|(name, _)| name == file)
    }

    /// The error for a missing file. If the weights `file` are missing, and a pickle is there, names the
    /// pickle.
    fn missing(&self, file: &str, weights: bool, hint: impl Into<String>) -> Error {
        let pickle = self.listed.iter().map(|(name, _)| name).find(|name| weights && is_pickle_name(name));
        let id = self.repository.id();
        match pickle {
            Some(file) => Error::PickleOnly { place: id, file: file.clone() },
            None => Error::NoHubFile {
                id,
                revision: self.repository.revision.clone(),
                file: file.to_string(),
                hint: hint.into(),
            },
        }
    }

    fn optional(&self, kind: Kind) -> impl Iterator<Item = &'static str> {
        optional(kind).into_iter().filter(move |f| self.has(f))
    }

    fn adapter(&self) -> Result<Vec<&'static str>, Error> {
        if let Some(file) = ADAPTER.into_iter().find(|f| !self.has(f)) {
            let hint = if self.has(CONFIG) { "; it has config.json: a model, not an adapter" } else { "" };
            return Err(self.missing(file, file == ADAPTER[1], hint));
        }
        Ok(ADAPTER.into_iter().chain(self.optional(Kind::Adapter)).collect())
    }

    fn model(&self, want: Want) -> Result<Vec<&'static str>, Error> {
        if !self.has(CONFIG) {
            let hint = if self.has(ADAPTER[0]) {
                "; it has adapter_config.json: an adapter, for lora.init"
            } else if self.listed.iter().any(|(name, _)| name.ends_with(".gguf")) {
                "; it has GGUF files: use the safetensors release of the model"
            } else {
                ""
            };
            return Err(self.missing(CONFIG, false, hint));
        }
        let mut wanted = vec![CONFIG];
        wanted.extend(self.optional(Kind::Model(want)));
        if want >= Want::Weights {
            // Only one of the two: some repositories contain the same weights twice.
            let weights = [SINGLE, INDEX].into_iter().find(|f| self.has(f));
            wanted.push(weights.ok_or_else(|| self.missing(SINGLE, true, format!(" (nor {INDEX})")))?);
        }
        Ok(wanted)
    }
}
