//! Options of several verbs.

use super::quickstart;
use crate::infer::usage;
use ft_recipe::Recipe;
use serde_json::{Map, Value};
use std::path::PathBuf;

/// A recipe and what is set over it.
#[derive(Clone, Debug, clap::Args)]
pub struct RecipeArgs {
    /// The recipe: a TOML file, or the name of a shipped one
    pub recipe: PathBuf,
    /// Any recipe key by its dotted path: run.steps=10, train.0.rank=8
    #[arg(value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

impl RecipeArgs {
    /// Loads the recipe; a shipped one finds the quickstart's files here.
    pub(super) fn load(&self) -> ft_base::Result<Recipe> {
        let recipe = Recipe::load(&self.recipe, &self.set)?;
        quickstart::provide(&self.recipe, &recipe, true)?;
        Ok(recipe)
    }
}

/// The chat template of a model that answers.
#[derive(Debug, clap::Args)]
pub struct TemplateArgs {
    /// A chat template to use instead of that of the training, or the model's own
    #[arg(long, value_name = "FILE")]
    pub(super) chat_template: Option<PathBuf>,
    /// A variable for the chat template: enable_thinking=false
    #[arg(long, value_name = "KEY=VALUE")]
    pub(super) template: Vec<String>,
}

impl TemplateArgs {
    /// The template variables; values are TOML, bare words are strings.
    pub(super) fn variables(&self) -> ft_base::Result<Map<String, Value>> {
        let variable = |text: &String| match text.split_once('=').filter(|(k, _)| !k.trim().is_empty()) {
            Some((key, value)) => Ok((key.trim().to_string(), ft_recipe::loose_value(value))),
            None => Err(usage(format!("--template {text:?}: KEY=VALUE is wanted"))),
        };
        self.template.iter().map(variable).collect()
    }
}
