//! The form of a training text, and a prompt in that form: a model is to be asked as it was trained.

use super::error::Error;
use super::{Tokenizer, format};
use ft_recipe::{Format, Source};
use ft_base::store;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::Path;

/// How a prompt becomes the text that a model goes on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// By the chat template.
    Chat,
    /// As the instruction of an Alpaca prompt.
    Alpaca,
    /// As it is: the model continues the text.
    Text,
}

impl Form {
    /// The words for the forms.
    pub const WORDS: &'static [(&'static str, &'static str)] = &[
        ("chat", "the chat template"),
        ("alpaca", "the instruction of an Alpaca prompt"),
        ("text", "a text to continue"),
    ];

    /// The form that a word names.
    pub fn from_word(word: &str) -> Option<Self> {
        [Self::Chat, Self::Alpaca, Self::Text].into_iter().find(|f| f.word() == word)
    }

    /// Its word.
    pub fn word(self) -> &'static str {
        Self::WORDS[self as usize].0
    }

    /// The form that a list of sources trains. Of several it is the first of chat, Alpaca and text that is among them; of
    /// ready tokens, which do not show theirs, it is chat where there is a chat template.
    pub fn of(sources: &[Source], tokenizer: Option<&Tokenizer>) -> Self {
        let any = |formats: &[Format]| sources.iter().any(|s| s.format.is_some_and(|f| formats.contains(&f)));
        let template = tokenizer.is_some_and(Tokenizer::has_template);
        if any(&[Format::Messages]) {
            Self::Chat
        } else if any(&[Format::Alpaca]) {
            Self::Alpaca
        } else if any(&[Format::Completion, Format::Text]) || !template {
            Self::Text
        } else {
            Self::Chat
        }
    }

    /// The tokens of a single prompt, up to where the model goes on. `system` is left out of plain continuation.
    ///
    /// # Errors
    /// What the chat template raises.
    pub fn prompt(
        self,
        tokenizer: &Tokenizer,
        system: Option<&str>,
        prompt: &str,
        variables: &Map<String, Value>,
    ) -> Result<Vec<u32>, Error> {
        let text = match self {
            Self::Chat => {
                let mut messages: Vec<Value> =
                    system.iter().map(|s| json!({"role": "system", "content": s})).collect();
                messages.push(json!({"role": "user", "content": prompt}));
                let text = tokenizer.render(&Value::Array(messages), None, true, variables)?;
                return tokenizer.encode(&text);
            }
            Self::Alpaca => format::alpaca_prompt(system, prompt),
            Self::Text => prompt.to_string(),
        };
        let mut ids = tokenizer.text_start().to_vec();
        ids.extend(tokenizer.encode(&text)?);
        Ok(ids)
    }
}

/// The file in an adapter's or a model's folder that says how it was trained. PEFT and transformers leave files that
/// they do not know alone.
const FILE: &str = "ft.json";
/// The chat template of a folder, where transformers looks first.
const TEMPLATE: &str = "chat_template.jinja";

/// Whether a file lies in a folder, or is the hub cache's link to its content: a link to anywhere else must not carry a
/// private file into a folder that may be published.
fn is_of(file: &Path, dir: &Path) -> bool {
    let (Ok(real), Ok(dir)) = (file.canonicalize(), dir.canonicalize()) else { return false };
    let blobs = dir.parent().and_then(Path::parent).map(|p| p.join("blobs"));
    real.is_file() && (real.parent() == Some(&dir) || real.parent() == blobs.as_deref())
}

/// How an adapter or a model was trained, as far as it has to be asked in the same way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trained {
    /// The form of the training texts.
    pub form: Form,
    /// Variables that the chat template had.
    #[serde(default)]
    pub template: Map<String, Value>,
}

impl Trained {
    /// Writes it into a folder, with the chat template that the recipe gave.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save(&self, dir: &Path, chat_template: Option<&str>) -> Result<(), store::Error> {
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        store::write_atomic(&dir.join(FILE), text.as_bytes())?;
        match chat_template.filter(|_| self.form == Form::Chat) {
            Some(template) => store::write_atomic(&dir.join(TEMPLATE), template.as_bytes()),
            None => Ok(()),
        }
    }

    /// Reads it from a folder; none where the folder does not say.
    ///
    /// # Errors
    /// A file that cannot be used.
    pub fn open(dir: &Path) -> Result<Option<Self>, Error> {
        let path = dir.join(FILE);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(cause) => return Err(Error::Read { path, cause }),
        };
        serde_json::from_slice(&bytes).map(Some).map_err(|e| Error::Tokenizer {
            path,
            message: format!("{e}; a newer version of ft may have written it"),
        })
    }

    /// Copies what one folder says into another.
    ///
    /// # Errors
    /// Files that cannot be read or written.
    pub fn copy(from: &Path, to: &Path) -> Result<(), store::Error> {
        for file in [FILE, TEMPLATE] {
            let source = from.join(file);
            if is_of(&source, from) {
                let bytes = std::fs::read(&source).map_err(|e| store::Error::read(&source, e))?;
                store::write_atomic(&to.join(file), &bytes)?;
            }
        }
        Ok(())
    }
}
