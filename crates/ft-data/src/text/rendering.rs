//! A rendered conversation, and renderings of its variants.

use super::marks::Rendered;
use crate::shape::messages::Chat;
use minijinja::Value as Jinja;

/// Renders a conversation. Arguments: messages, tools, with a generation prompt, with the recipe's
/// variables.
pub(super) type Render<'a> = dyn Fn(&[Jinja], &Jinja, bool, bool) -> Result<String, String> + 'a;

/// A conversation, the rendered text, and the renderer.
pub(super) struct Rendering<'a> {
    pub chat: &'a Chat,
    pub messages: &'a [Jinja],
    pub tools: &'a Jinja,
    pub text: &'a str,
    pub render: &'a Render<'a>,
    /// End-of-sequence tokens of the model.
    pub stops: &'a [String],
}

impl Rendering<'_> {
    /// Renders other messages and tools; `None` if the template raises an error.
    pub fn of(&self, messages: &[Jinja], tools: &Jinja) -> Option<Rendered> {
        Some(Rendered::new(&(self.render)(messages, tools, false, true).ok()?))
    }
}
