//! A rendered conversation, and renderings of its variants.

use super::marks::Rendered;
use crate::shape::messages::Chat;
use minijinja::Value as Jinja;
use std::ops::Range;

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

    /// End of the end-of-sequence token at an offset of a text, behind white space.
    pub fn stop(&self, text: &str, at: usize) -> Option<usize> {
        let behind = text[at..].trim_start();
        let bytes = self.stops.iter().filter(|s| behind.starts_with(s.as_str())).map(String::len).max()?;
        Some(text.len() - behind.len() + bytes)
    }

    /// Whether an end-of-sequence token stands behind a span, outside of the sorted spans, and none at its end.
    pub fn stops_outside(&self, spans: &[Range<usize>]) -> bool {
        (1..).zip(spans).any(|(next, span)| {
            let inside = self.text[span.clone()].trim_end();
            let is_open = !inside.is_empty() && !self.stops.iter().any(|s| inside.ends_with(s.as_str()));
            let end = self.stop(self.text, span.end).filter(|_| is_open);
            end.is_some_and(|end| spans.get(next).is_none_or(|next| end <= next.start))
        })
    }
}
