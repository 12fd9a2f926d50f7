//! Selection of the required files of a repository.

use super::files::{ADAPTER, CONFIG, Kind, Repository, TOKENIZER};
use super::{Error, Want};
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
            wanted.extend(WITH_ADAPTER.into_iter().filter(|f| has(f)));
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
                // Only one of the two: some repositories contain the same weights twice.
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
