//! Selection of the required files of a repository.

use super::error::Error;
use super::files::{ADAPTER, CONFIG, Repository, TOKENIZER};
use super::request::{Kind, Want};
use ft_base::store::{INDEX, SINGLE, is_pickle_name};
use ft_data::{CHAT_TEMPLATE, TOOL_USE};

const WITH_CONFIG: [&str; 1] = ["generation_config.json"];
/// Prompt format and chat templates of an adapter, and a tokenizer with its own tokens.
const WITH_ADAPTER: [&str; 6] =
    ["ft.json", CHAT_TEMPLATE, TOOL_USE, TOKENIZER, "tokenizer_config.json", "chat_template.json"];
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
/// [`Error::NoHubFile`] for a missing required file; [`Error::IsAdapter`]; [`Error::PickleOnly`].
pub(super) fn choose(
    repository: &Repository,
    listed: &[(String, u64)],
    kind: Kind,
) -> Result<Vec<String>, Error> {
    let has = |file: &str| listed.iter().any(|(name, _)| name == file);
    let pickle = listed.iter().map(|(name, _)| name).find(|name| is_pickle_name(name));
    let no_weights = |file: &str, hint: &str| match pickle {
        Some(pickle) => Error::PickleOnly { place: repository.id(), file: pickle.clone() },
        None => repository.no_file(file, hint),
    };
    let mut wanted = match kind {
        Kind::Adapter => {
            let hint = if has(CONFIG) { "; it has config.json: a model, not an adapter" } else { "" };
            let [config, weights] = ADAPTER;
            if !has(config) {
                return Err(repository.no_file(config, hint));
            }
            if !has(weights) {
                return Err(no_weights(weights, hint));
            }
            ADAPTER.to_vec()
        }
        Kind::Model(_) if has(CONFIG) => vec![CONFIG],
        Kind::Model(_) if has(ADAPTER[0]) => return Err(Error::IsAdapter { place: repository.id() }),
        Kind::Model(_) => {
            let hint = if listed.iter().any(|(name, _)| name.ends_with(".gguf")) {
                "; it has GGUF files: use the safetensors release of the model"
            } else {
                ""
            };
            return Err(repository.no_file(CONFIG, hint));
        }
    };
    wanted.extend(optional(kind).into_iter().filter(|file| has(file)));
    if kind == Kind::Model(Want::Weights) {
        // Only one of the two: some repositories contain the same weights twice.
        let weights = [SINGLE, INDEX].into_iter().find(|file| has(file));
        let none = || match has(ADAPTER[0]) {
            true => Error::IsAdapter { place: repository.id() },
            false => no_weights(SINGLE, &format!(" (nor {INDEX})")),
        };
        wanted.push(weights.ok_or_else(none)?);
    }
    Ok(wanted.into_iter().map(str::to_string).collect())
}
