//! Cache key of a model folder.

use super::model_files::{CHAT_TEMPLATE, TOOL_USE, folder_of_template};
use crate::text::date::{self, Changes};
use ft_base::store;
use serde_json::json;
use std::path::Path;

/// Files of a model folder that affect tokenization.
const TOKENIZER: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    CHAT_TEMPLATE,
    TOOL_USE,
    "chat_template.json",
    "generation_config.json",
    "config.json",
];

/// Hash of the model files that determine tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModelKey {
    hash: String,
    /// Whether the template may render the current date.
    dated: bool,
}

impl ModelKey {
    /// Hashes model folder `dir` and an explicit template, with the one for tools beside it; `None` if a template may
    /// render the time of day.
    pub fn of(dir: &Path, template: Option<&Path>) -> Option<Self> {
        let (mut h, mut dated) = (blake3::Hasher::new(), false);
        let own = TOKENIZER.iter().map(|f| (*f, store::read_inside(dir, f, store::LARGEST).ok()));
        let given = template.map(|path| ("", store::read_plain(path, store::LARGEST).ok()));
        let beside = template.and_then(folder_of_template);
        let tools =
            beside.map(|folder| (TOOL_USE, store::read_inside(folder, TOOL_USE, store::LARGEST).ok()));
        for (name, bytes) in own.chain(given).chain(tools) {
            match bytes {
                Some(bytes) => {
                    // the largest file; contains no template
                    if name != TOKENIZER[0] {
                        let text = String::from_utf8_lossy(&bytes);
                        match date::changes(&text) {
                            Changes::Never => {}
                            Changes::Daily => dated = true,
                            Changes::Always => return None,
                        }
                    }
                    h.update(&(bytes.len() as u64 + 1).to_le_bytes()).update(&bytes)
                }
                None => h.update(&0u64.to_le_bytes()),
            };
        }
        Some(Self { hash: h.finalize().to_hex().to_string(), dated })
    }

    /// Adds tokens missing from the folder's tokenizer.
    pub fn with(self, more: Option<&Vec<(String, u32)>>) -> Self {
        match more {
            None => self,
            Some(tokens) => Self { hash: format!("{} {}", self.hash, json!(tokens)), ..self },
        }
    }

    /// The key, with the current date if the template may render it.
    pub fn today(&self) -> String {
        if self.dated {
            format!("{} {}", self.hash, date::now("%Y-%m-%d").unwrap_or_default())
        } else {
            self.hash.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_with_the_time_of_day_has_no_key_and_one_with_the_date_has_todays() {
        let dir = tempfile::tempdir().unwrap();
        let of = |template: &str| {
            std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
            ModelKey::of(dir.path(), None)
        };
        let plain = of("{{ messages }}").unwrap();
        assert!(!plain.dated && plain.today() == plain.hash);
        let dated = of("{{ strftime_now('%d %b %Y') }}{%- set x = 1 %}").unwrap();
        // a day may end in between
        let date = || date::now("%Y-%m-%d").unwrap();
        let (before, key, after) = (date(), dated.today(), date());
        assert!(dated.dated && [before, after].iter().any(|day| key.ends_with(day)));
        assert_eq!(of("{{ strftime_now('%-H:%M') }}"), None);
        assert_eq!(of("{{ strftime_now('%F %T') }}"), None);
        assert_ne!(of("{{ messages[0] }}").unwrap().hash, plain.hash);
        std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
        std::fs::write(dir.path().join(TOOL_USE), "{{ tools }}").unwrap();
        assert_ne!(of("{{ messages }}").unwrap().hash, plain.hash);
        let given = dir.path().join("other.jinja");
        std::fs::write(&given, "{{ strftime_now('%H') }}").unwrap();
        assert_eq!(ModelKey::of(dir.path(), Some(&given)), None);
    }

    #[test]
    fn the_template_for_tools_beside_a_given_one_is_part_of_the_key() {
        let [model, adapter] = [(), ()].map(|()| tempfile::tempdir().unwrap());
        let given = adapter.path().join("chat_template.jinja");
        std::fs::write(&given, "{{ messages }}").unwrap();
        let key = || ModelKey::of(model.path(), Some(&given));
        let without = key();
        std::fs::create_dir(adapter.path().join("additional_chat_templates")).unwrap();
        std::fs::write(adapter.path().join(TOOL_USE), "{{ tools }}").unwrap();
        assert_ne!(key(), without);
    }
}
