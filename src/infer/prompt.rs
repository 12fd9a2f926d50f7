//! Prompt format of a model.

use super::usage;
use crate::train::job;
use ft_data::{Error, PromptFormat, Tokenizer};
use serde_json::{Map, Value};
use std::sync::Arc;

/// Converts conversations and texts to token ids, as in the training data.
pub struct Prompter {
    pub tokenizer: Arc<Tokenizer>,
    pub form: PromptFormat,
    /// Variables of the chat template.
    pub variables: Map<String, Value>,
}

impl Prompter {
    /// With the template variables of the training, and those `given` as `--template` over them.
    ///
    /// # Errors
    /// A given variable without effect.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        form: PromptFormat,
        trained: Map<String, Value>,
        given: Map<String, Value>,
    ) -> ft_base::Result<Self> {
        if form != PromptFormat::Chat && !given.is_empty() {
            let why = "--template: the model was not trained with a chat template";
            return Err(usage(format!("{why}\n  hint: leave it out, or --chat-template FILE.jinja")));
        }
        if let Some((name, why)) = job::unread_variable(&tokenizer, &given) {
            return Err(usage(format!("--template {name}: {why}")));
        }
        let mut variables = trained;
        variables.extend(given);
        Ok(Self { tokenizer, form, variables })
    }

    /// Token ids of a conversation in the chat template, up to the start of the answer. `more` are further
    /// variables of the template.
    ///
    /// # Errors
    /// No template, or an error raised by the template.
    pub fn conversation(&self, messages: Vec<Value>, more: Map<String, Value>) -> Result<Vec<u32>, Error> {
        let mut variables = self.variables.clone();
        variables.extend(more);
        self.tokenizer.encode(&self.tokenizer.render(&Value::Array(messages), None, true, &variables)?)
    }

    /// Token ids of a single prompt.
    ///
    /// # Errors
    /// As [`PromptFormat::prompt`].
    pub fn single(&self, system: Option<&str>, prompt: &str) -> Result<Vec<u32>, Error> {
        self.form.prompt(&self.tokenizer, system, prompt, &self.variables)
    }
}
