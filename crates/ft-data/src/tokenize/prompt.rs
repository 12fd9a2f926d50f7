//! Prompt format of a trained model, so that inference prompts match the training text.

use super::model_files::{CHAT_TEMPLATE, TOOL_USE, TemplateSource, template_of};
use super::tokenizer::Tokenizer;
use crate::error::Error;
use crate::shape::alpaca::alpaca_prompt;
use ft_base::store;
use ft_recipe::{Format, Source};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Conversion of a prompt to model input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PromptFormat {
    /// By the chat template.
    Chat,
    /// As the instruction of an Alpaca prompt.
    Alpaca,
    /// Verbatim, as text to continue.
    Text,
}

impl PromptFormat {
    /// Names and descriptions of the forms.
    pub const WORDS: &'static [(&'static str, &'static str)] = &[
        ("chat", "the chat template"),
        ("alpaca", "the instruction of an Alpaca prompt"),
        ("text", "a text to continue"),
    ];

    /// Parses the name of a form.
    pub fn from_word(word: &str) -> Option<Self> {
        [Self::Chat, Self::Alpaca, Self::Text].into_iter().find(|f| f.word() == word)
    }

    /// Name of the form.
    pub fn word(self) -> &'static str {
        Self::WORDS[self as usize].0
    }

    /// Description of training rows in this form.
    pub fn trains(self) -> &'static str {
        match self {
            Self::Chat => "conversations by the chat template",
            Self::Alpaca => "Alpaca prompts",
            Self::Text => "plain text",
        }
    }

    /// The form trained by a list of sources: the first of chat, Alpaca and text found among them. Sources of
    /// tokens, and of preferences without a form, whose rows are texts or messages, do not show one; they default to
    /// chat if a chat template exists.
    pub fn of(sources: &[Source], tokenizer: Option<&Tokenizer>) -> Self {
        let template = tokenizer.is_some_and(Tokenizer::has_template);
        let default = if template { Self::Chat } else { Self::Text };
        Self::all_of(sources, template).first().copied().unwrap_or(default)
    }

    /// All forms of a list of sources: chat, Alpaca, text.
    pub fn all_of(sources: &[Source], template: bool) -> Vec<Self> {
        let forms: Vec<Self> = sources.iter().filter_map(|s| Self::of_source(s, template)).collect();
        let mut all = vec![Self::Chat, Self::Alpaca, Self::Text];
        all.retain(|f| forms.contains(f));
        all
    }

    /// The form of a source's rows; `None` for token ids, and for preferences without a form.
    fn of_source(source: &Source, template: bool) -> Option<Self> {
        match source.format? {
            Format::Tokens => None,
            f if f.is_preference() && source.form.is_none() => None,
            _ if source.is_chat(template) => Some(Self::Chat),
            Format::Alpaca => Some(Self::Alpaca),
            _ => Some(Self::Text),
        }
    }

    /// Token ids of a single prompt, up to the start of the answer. Plain text ignores `system`.
    ///
    /// # Errors
    /// An error raised by the chat template.
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
            Self::Alpaca => alpaca_prompt(system, prompt),
            Self::Text => prompt.to_string(),
        };
        let mut ids = tokenizer.text_start().to_vec();
        ids.extend(tokenizer.encode(&text)?);
        Ok(ids)
    }
}

/// File in an adapter or model folder with the prompt format. PEFT and transformers ignore unknown files.
const FILE: &str = "ft.json";

/// Prompt format of a trained adapter or model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptConfig {
    /// Format of the training texts.
    pub form: PromptFormat,
    /// Formats of further training texts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<PromptFormat>,
    /// Variables passed to the chat template.
    #[serde(default)]
    pub template: Map<String, Value>,
}

impl PromptConfig {
    /// Writes the prompt format to a folder, with the recipe's chat template.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save(&self, dir: &Path, chat_template: Option<&TemplateSource>) -> Result<(), store::Error> {
        store::write_json(&dir.join(FILE), self)?;
        let template = chat_template.filter(|_| self.form == PromptFormat::Chat);
        template.map_or(Ok(()), |template| write_template(dir, template))
    }

    /// Reads the prompt format from a folder; `None` if absent.
    ///
    /// # Errors
    /// An invalid file.
    pub fn open(dir: &Path) -> Result<Option<Self>, Error> {
        let Some(bytes) = store::read_if_there(dir, FILE, store::LARGEST)? else { return Ok(None) };
        serde_json::from_slice(&bytes).map(Some).map_err(|e| {
            Error::tokenizer(&dir.join(FILE), format!("{e}; a newer version of ft may have written it"))
        })
    }

    /// Copies the prompt format of an adapter to a folder.
    ///
    /// # Errors
    /// Files that are invalid, or cannot be read or written.
    pub fn copy(from: &Path, to: &Path) -> Result<(), Error> {
        if let Some(template) = adapter_template(from, to)? {
            write_template(to, &template)?;
        }
        Ok([FILE, TOOL_USE].into_iter().try_for_each(|file| store::copy_inside(from, file, to))?)
    }
}

/// The chat template of an adapter, unless the same as in `base`, the folder of a model.
///
/// # Errors
/// Existing files that are invalid.
pub fn adapter_template(adapter: &Path, base: &Path) -> Result<Option<TemplateSource>, Error> {
    let is_there = |file: &str| adapter.join(file).is_file();
    if is_there(CHAT_TEMPLATE) {
        return template_of(adapter);
    }
    // ft writes no other template; the tokenizer files beside adapters of ft are the base's
    if is_there(FILE) {
        return Ok(None);
    }
    let Some(own) = template_of(adapter)? else { return Ok(None) };
    // a base with the same template may have another one for tools, in a file
    let is_same = |base: TemplateSource| {
        base.default == own.default && (own.tool_use.is_none() || own.tool_use == base.tool_use)
    };
    let is_base = template_of(base)?.is_some_and(is_same);
    Ok(Some(own).filter(|_| !is_base))
}

/// Replaces the chat templates of a folder. A template for tools belongs to the old one, and is removed.
fn write_template(dir: &Path, template: &TemplateSource) -> Result<(), store::Error> {
    let new = template.default.as_bytes();
    if store::read_if_there(dir, CHAT_TEMPLATE, store::LARGEST)?.is_none_or(|old| old != new) {
        store::write_atomic(&dir.join(CHAT_TEMPLATE), new)?;
        store::remove_if_there(&dir.join(TOOL_USE))?;
    }
    let tool_use = template.tool_use.iter();
    tool_use.map(String::as_bytes).try_for_each(|text| store::write_atomic(&dir.join(TOOL_USE), text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_for_tools_goes_with_its_chat_template() -> anyhow::Result<()> {
        let dirs = [tempfile::tempdir()?, tempfile::tempdir()?];
        let [from, to] = dirs.each_ref().map(|d| d.path());
        for dir in [from, to] {
            std::fs::create_dir(dir.join("additional_chat_templates"))?;
            std::fs::write(dir.join(TOOL_USE), dir.display().to_string())?;
            std::fs::write(dir.join(CHAT_TEMPLATE), "{{ a }}")?;
        }
        let trained = PromptConfig { form: PromptFormat::Chat, also: Vec::new(), template: Map::new() };
        let given = |text: &str, tools: Option<&str>| TemplateSource {
            origin: String::new(),
            default: text.into(),
            tool_use: tools.map(String::from),
        };
        trained.save(from, Some(&given("{{ a }}", None)))?;
        PromptConfig::copy(from, to)?;
        assert_eq!(std::fs::read_to_string(to.join(TOOL_USE))?, from.display().to_string());
        // An adapter may lack the template for tools of its base.
        std::fs::remove_file(from.join(TOOL_USE))?;
        PromptConfig::copy(from, to)?;
        assert!(to.join(TOOL_USE).exists());
        trained.save(from, Some(&given("{{ messages }}", None)))?;
        PromptConfig::copy(from, to)?;
        assert_eq!(std::fs::read_to_string(to.join(CHAT_TEMPLATE))?, "{{ messages }}");
        assert!(!to.join(TOOL_USE).exists());
        trained.save(from, Some(&given("{{ messages }}", Some("{{ tools }}"))))?;
        assert_eq!(std::fs::read_to_string(from.join(TOOL_USE))?, "{{ tools }}");
        Ok(())
    }

    #[test]
    fn an_adapter_s_template_in_a_config_is_its_own() -> anyhow::Result<()> {
        let dirs = [tempfile::tempdir()?, tempfile::tempdir()?];
        let [adapter, base] = dirs.each_ref().map(|d| d.path());
        let write = |dir: &Path, file: &str, template: Value| {
            std::fs::write(dir.join(file), json!({"chat_template": template}).to_string())
        };
        let own = || anyhow::Ok(adapter_template(adapter, base)?.map(|t| (t.default, t.tool_use)));
        assert_eq!(own()?, None);
        write(base, "tokenizer_config.json", json!("{{ a }}"))?;
        write(adapter, "tokenizer_config.json", json!("{{ b }}"))?;
        assert_eq!(own()?, Some(("{{ b }}".into(), None)));
        write(adapter, "chat_template.json", json!("{{ c }}"))?;
        assert_eq!(own()?, Some(("{{ c }}".into(), None)));
        PromptConfig::copy(adapter, base)?;
        assert_eq!(std::fs::read_to_string(base.join(CHAT_TEMPLATE))?, "{{ c }}");
        assert_eq!(own()?, None, "the base has the same");
        let list = [("default", "{{ c }}"), ("tool_use", "{{ tools }}")];
        let list = list.map(|(name, template)| json!({"name": name, "template": template}));
        write(adapter, "chat_template.json", json!(list))?;
        assert_eq!(own()?, Some(("{{ c }}".into(), Some("{{ tools }}".into()))));
        // ft wrote the adapter
        std::fs::write(adapter.join(FILE), "{}")?;
        assert_eq!(own()?, None);
        std::fs::write(adapter.join(CHAT_TEMPLATE), "{{ d }}")?;
        assert_eq!(own()?, Some(("{{ d }}".into(), None)));
        Ok(())
    }
}
