//! Selection of the required files of a repository.

use super::error::Error;
use super::files::{ADAPTER, CONFIG, Repository, TOKENIZER};
use super::request::{Kind, Want};
use ft_base::store::{INDEX, SINGLE, is_pickle_name};

const WITH_CONFIG: [&str; 1] = ["generation_config.json"];
/// Prompt format and chat template of an adapter.
const WITH_ADAPTER: [&str; 2] = ["ft.json", "chat_template.jinja"];
const WITH_TOKENIZER: [&str; 7] = [
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "added_tokens.json",
    "ft.json",
];

/// Selects files from the root of a repository. The shards of a selected shard index are added later.
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

    fn adapter(&self) -> Result<Vec<&'static str>, Error> {
        if let Some(file) = ADAPTER.into_iter().find(|f| !self.has(f)) {
            let hint = if self.has(CONFIG) { "; it has config.json: a model, not an adapter" } else { "" };
            return Err(self.missing(file, file == ADAPTER[1], hint));
        }
        Ok(ADAPTER.into_iter().chain(WITH_ADAPTER.into_iter().filter(|f| self.has(f))).collect())
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
        wanted.extend(WITH_CONFIG.into_iter().filter(|f| self.has(f)));
        if want >= Want::Tokenizer {
            wanted.extend(WITH_TOKENIZER.into_iter().filter(|f| self.has(f)));
        }
        if want >= Want::Weights {
            // Only one of the two: some repositories contain the same weights twice.
            let weights = [SINGLE, INDEX].into_iter().find(|f| self.has(f));
            wanted.push(weights.ok_or_else(|| self.missing(SINGLE, true, format!(" (nor {INDEX})")))?);
        }
        Ok(wanted)
    }
}
