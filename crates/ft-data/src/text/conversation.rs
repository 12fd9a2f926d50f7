//! Renders a conversation, checks the text for completeness, and finds the assistant spans.

use super::fragments::{Fragment, fragments};
use super::marks::jinja;
use super::rendering::Rendering;
use super::spans::{self, Marked};
use super::template::{Template, Variables};
use super::verbatim;
use crate::shape::{messages::Chat, notes::Note};
use minijinja::Value as Jinja;
use std::cell::RefCell;
use std::ops::Range;

/// Renders a conversation. With `supervise`, also returns the byte ranges written by the assistant,
/// including the end-of-turn tokens. Tolerated differences between text and conversation are added to `notes`.
/// `variables` are the model's, without and with the recipe's; `stops` are the end-of-sequence tokens.
///
/// # Errors
/// An error raised by the template, content missing from the text, or turns that cannot be told apart or are too many.
pub(crate) fn render(
    chat: &Chat,
    template: &Template,
    variables: [Variables; 2],
    stops: &[String],
    supervise: bool,
    notes: &mut Vec<Note>,
) -> Result<(String, Vec<Range<usize>>), String> {
    let messages: Vec<Jinja> = chat.messages.iter().map(jinja).collect();
    let tools = chat.tools.as_ref().map_or(Jinja::from(()), jinja);
    // the template's own error message and line, if rendering the conversation itself fails
    let raised = RefCell::new(None);
    let render = |messages: &[Jinja], tools: &Jinja, prompt: bool, with: bool| {
        let out = template.render(messages, tools, prompt, &variables[usize::from(with)]);
        out.map(|o| o.0).map_err(|e| {
            let text = e.to_string();
            raised.borrow_mut().get_or_insert(text.clone());
            text
        })
    };
    let first = template.render(&messages, &tools, false, &variables[1]).map_err(|e| e.to_string())?;
    let (text, generation) = first;
    let fragments = fragments(chat);
    let rendering =
        Rendering { chat, messages: &messages, tools: &tools, text: &text, render: &render, stops };
    // if the template marks the supervised text itself, only the check needs marks
    let has_generation = template.has_generation(&tools);
    if supervise && !has_generation {
        spans::check_work(&chat.messages).map_err(|why| template.fail(0, why).to_string())?;
    }
    let by_itself = !supervise || has_generation && chat.unsupervised.is_empty();
    let proven = by_itself && verbatim::proven(chat, &fragments, &text, template, &variables[1]);
    let mut marked = None;
    if !proven {
        marked = Marked::all(&rendering, &fragments);
        rendering.check(&fragments, marked.as_ref(), notes)?;
    }
    if !supervise {
        return Ok((text, Vec::new()));
    }
    let spans = if has_generation {
        let spans = without(chat, generation, &fragments, marked.as_ref())?;
        if rendering.stops_outside(&spans) {
            notes.push(Note::StopOutside);
        }
        spans
    } else {
        let spans = spans::assistant(&rendering, marked);
        let spans = spans.map_err(|message| match raised.take() {
            Some(e) if e == message => e,
            _ => template.fail(0, by_name(chat, message)).to_string(),
        })?;
        if spans.open {
            notes.push(Note::Open);
        }
        spans.spans.into_iter().filter(|(i, _)| !chat.unsupervised.contains(i)).map(|(_, s)| s).collect()
    };
    Ok((text, spans))
}

/// Replaces `messages[i]` (rendered index) in an error message by the row's name for the message.
fn by_name(chat: &Chat, message: String) -> String {
    let named = message.strip_prefix("messages[").and_then(|m| m.split_once(']'));
    match named.and_then(|(i, rest)| Some((i.parse().ok()?, rest))) {
        Some((i, rest)) => chat.name(i) + rest,
        None => message,
    }
}

/// The spans marked by the template (`{% generation %}`), minus messages excluded from the loss by the row.
fn without(
    chat: &Chat,
    spans: Vec<Range<usize>>,
    fragments: &[Fragment],
    marked: Option<&Marked>,
) -> Result<Vec<Range<usize>>, String> {
    if chat.unsupervised.is_empty() {
        return Ok(spans);
    }
    let mut out = Vec::new();
    let mut gone = Vec::new();
    for span in spans {
        let inside: Vec<usize> = marked.iter().flat_map(|m| m.within(fragments, &span)).collect();
        let (off, on): (Vec<usize>, Vec<usize>) = inside.iter().partition(|i| chat.unsupervised.contains(i));
        match (off.is_empty(), on.is_empty()) {
            (true, false) => out.push(span),
            (false, true) => gone.extend(off),
            _ => return Err(unclear(chat)),
        }
    }
    if chat.unsupervised.iter().all(|i| gone.contains(i)) { Ok(out) } else { Err(unclear(chat)) }
}

fn unclear(chat: &Chat) -> String {
    let name = chat.unsupervised.first().map(|i| chat.name(*i)).unwrap_or_default();
    format!(
        "{name}.weight: 0, and the template's {{% generation %}} blocks do not show which text is this message's"
    )
}
