//! Finds the assistant's part of a rendered conversation: from the end of the generation prompt through the
//! end-of-turn token.
//!
//! Templates do not report this (unless they use `{% generation %}`), and rendering is not compositional:
//! Qwen3 removes the reasoning of earlier turns, Mistral moves the system message to the last user turn.
//! Three renderings locate the spans:
//!
//! 1. The conversation with an invisible mark inside every message. Removing the marks must restore the
//!    text exactly; otherwise other positions are tried. The marks locate the messages even if a message
//!    contains look-alikes of special tokens.
//! 2. The turns before an assistant turn, with the generation prompt: the text after the last mark is the
//!    header of the turn. The full text must continue with exactly this header.
//! 3. The conversation up to and including the turn: the text after the mark is the end of the turn.
//!
//! Some templates close a turn only by the next header (GLM's `<|user|>`). If that header begins with an
//! end-of-sequence token, and the turn has none, the span includes it; the last turn has no end to train. Others
//! write an end-of-sequence token behind the last turn alone (`<|return|>` of gpt-oss; earlier turns have `<|end|>`):
//! earlier spans then stop at their content.
//!
//! If the renderings disagree, or a span holds another message (Gemma 4 writes the results of tools before the text of
//! the call), the result is an error, never a guessed mask.

use super::fragments::{Fragment, step};
use super::marks::{MarkPosition, Rendered, field, jinja, mark, with_marks};
use super::rendering::{Render, Rendering};
use crate::shape::keys::says_nothing;
use minijinja::Value as Jinja;
use serde_json::Value;
use std::ops::Range;

/// Most messages rendered to find the turns of a row. Every turn needs two renderings of the messages before it.
const MOST_RENDERED: usize = 8 << 20;

/// Supervised byte ranges of the assistant's turns.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Message index and range of each turn.
    pub spans: Vec<(usize, Range<usize>)>,
    /// Whether the last turn has no end in the text.
    pub open: bool,
}

/// Checks that the turns of a conversation can be found in reasonable time.
///
/// # Errors
/// Too many turns.
pub(super) fn check_work(messages: &[Value]) -> Result<(), String> {
    let turns = messages.iter().enumerate().filter(|(_, m)| is_assistant(m));
    if turns.map(|(i, _)| 2 * i + 1).sum::<usize>() <= MOST_RENDERED {
        return Ok(());
    }
    Err(format!(
        "the assistant's turns in {} messages are too many to find one by one; split the row, or use a template with \
         {{% generation %}} blocks (data.chat_template), or data.mask = \"none\"",
        messages.len()
    ))
}

/// Finds the supervised byte range of every assistant turn. `marked` is the text with a mark in every fragment, if
/// available. An empty turn that the text does not show has none.
///
/// # Errors
/// An error raised by the template, or turns that cannot be told apart.
pub(super) fn assistant(rendering: &Rendering<'_>, marked: Option<Marked>) -> Result<Turns, String> {
    let (messages, render) = (&rendering.chat.messages, rendering.render);
    let turns: Vec<usize> = (0..messages.len()).filter(|&i| is_assistant(&messages[i])).collect();
    let mut out = Turns::default();
    if turns.is_empty() {
        return Ok(out);
    }
    let marked = match marked.filter(|m| turns.iter().all(|i| m.main[*i].is_some())) {
        Some(marked) => marked,
        None => Marked::place(rendering)?,
    };
    let of_others = |id: usize| marked.message(id).is_some_and(|m| !is_assistant(&messages[m]));
    for &i in &turns {
        let (first, own) = match marked.own(i, rendering) {
            Some(found) => found,
            None if !says_something(&messages[i]) => continue,
            None => return Err(unclear(i, "it cannot be found in the text")),
        };
        let start = marked.start(i, first, render)?;
        let (end, open) = marked.end(i, own, rendering)?;
        out.open |= open;
        if start > first || end < own || out.spans.last().is_some_and(|s| s.1.end > start) {
            return Err(unclear(i, "its turn overlaps another"));
        }
        if marked.ids(&(start..end)).any(of_others) {
            return Err(unclear(i, "another message stands inside its turn"));
        }
        out.spans.push((i, start..end));
    }
    Ok(out)
}

fn unclear(i: usize, why: &str) -> String {
    format!(
        "messages[{i}]: the chat template does not show which text is this assistant turn ({why}); \
         use a template with {{% generation %}} blocks (data.chat_template), or data.mask = \"none\""
    )
}

/// The text after a mark inside the marked string, without trailing white space.
fn rest(message: &Value, position: &MarkPosition) -> String {
    let field = field(message, &position.pointer).and_then(Value::as_str).unwrap_or_default();
    field[position.at..].trim_end().to_string()
}

fn is_assistant(message: &Value) -> bool {
    message.get("role").and_then(Value::as_str) == Some("assistant")
}

/// Whether the text has to show where a message stands.
fn is_needed(message: &Value) -> bool {
    is_assistant(message) && says_something(message)
}

/// Whether a message has more than white space.
fn says_something(message: &Value) -> bool {
    message.as_object().into_iter().flatten().any(|(key, v)| key != "role" && !says_nothing(v))
}

/// Candidate mark positions in a message, best first: after the last visible character of strings almost
/// certainly rendered.
fn positions(message: &Value) -> Vec<MarkPosition> {
    let mut out = Vec::new();
    let end = |pointer: &str, out: &mut Vec<MarkPosition>| {
        if let Some(text) = field(message, pointer).and_then(Value::as_str)
            && !text.trim().is_empty()
        {
            out.push(MarkPosition { pointer: pointer.into(), at: text.trim_end().len() });
        }
    };
    end("/content", &mut out);
    if let Some(calls) = message.get("tool_calls").and_then(Value::as_array)
        && let Some(last) = calls.len().checked_sub(1)
    {
        end(&format!("/tool_calls/{last}/function/name"), &mut out);
        end(&format!("/tool_calls/{last}/name"), &mut out);
        for key in ["function/arguments", "arguments"] {
            let at = format!("/tool_calls/{last}/{key}");
            match message.pointer(&at) {
                Some(Value::Object(map)) => {
                    for (k, _) in map.iter().filter(|(_, v)| v.is_string()).take(2) {
                        end(&format!("{at}/{}", step(k)), &mut out);
                    }
                }
                _ => end(&at, &mut out),
            }
        }
    }
    end("/reasoning_content", &mut out);
    if let Some(text) = message.get("content").and_then(Value::as_str) {
        let at = text.floor_char_boundary(text.len() / 2);
        out.push(MarkPosition { pointer: "/content".into(), at });
    }
    out
}

/// A conversation with marks.
pub(super) struct Marked {
    /// The messages with marks inserted.
    messages: Vec<Jinja>,
    tools: Jinja,
    /// For every message, the id of the mark that locates it, and the text after the mark inside the
    /// message without trailing white space.
    main: Vec<Option<(usize, String)>>,
    pub whole: Rendered,
}

impl Marked {
    /// Puts a mark at the end of every fragment, with the index of the fragment as id. `None` if the rendered
    /// text changes.
    pub fn all(rendering: &Rendering<'_>, fragments: &[Fragment]) -> Option<Self> {
        let chat = rendering.chat;
        let of = |message: Option<usize>| {
            let order = |message: Option<usize>| message.unwrap_or(usize::MAX);
            let first = fragments.partition_point(|p| order(p.message) < order(message));
            let behind = (first..).zip(&fragments[first..]);
            behind.take_while(move |(_, p)| p.message == message).map(|(id, p)| (id, &p.position))
        };
        let mut marked = rendering.messages.to_vec();
        for (i, message) in chat.messages.iter().enumerate() {
            if of(Some(i)).next().is_some() {
                marked[i] = jinja(&with_marks(message, of(Some(i))));
            }
        }
        let tools = match chat.tools.as_ref().filter(|_| of(None).next().is_some()) {
            Some(tools) => jinja(&with_marks(tools, of(None))),
            None => rendering.tools.clone(),
        };
        let whole = rendering.of(&marked, &tools).filter(|w| w.text == rendering.text)?;
        let main = |(i, message): (usize, &Value)| {
            let positions = positions(message);
            let there = |most: usize| {
                let fits = |id: usize| (1..=most).contains(&whole.all(id).count());
                let at = |position: &MarkPosition| of(Some(i)).find(|(id, s)| *s == position && fits(*id));
                positions.iter().find_map(at)
            };
            // a string repeated by the text (the name of a call, in its result) may stand in another message
            let (id, position) = there(1).or_else(|| there(usize::MAX))?;
            Some((id, rest(message, position)))
        };
        let main = chat.messages.iter().enumerate().map(main).collect();
        Some(Self { messages: marked, tools, main, whole })
    }

    fn place(rendering: &Rendering<'_>) -> Result<Self, String> {
        let messages = &rendering.chat.messages;
        let positions: Vec<Vec<MarkPosition>> = messages.iter().map(positions).collect();
        let mut chosen: Vec<Option<MarkPosition>> = positions.iter().map(|s| s.first().cloned()).collect();
        if let Some(whole) = Self::try_marks(rendering, &chosen) {
            return Ok(whole);
        }
        // tries messages one by one, until every message has a mark that appears in the text and leaves it
        // unchanged
        for i in 0..messages.len() {
            let mut alone = rendering.messages.to_vec();
            chosen[i] = positions[i].iter().find_map(|position| {
                alone[i] = jinja(&with_marks(&messages[i], std::iter::once((i, position))));
                let seen = rendering.of(&alone, rendering.tools)?;
                (seen.text == rendering.text && seen.at(i).is_some()).then(|| position.clone())
            });
        }
        if let Some(i) = (0..messages.len()).find(|&i| chosen[i].is_none() && is_needed(&messages[i])) {
            return Err(unclear(i, "the text does not hold it, or depends on every character of it"));
        }
        Self::try_marks(rendering, &chosen)
            .ok_or_else(|| unclear(0, "messages change how each other is written"))
    }

    fn try_marks(rendering: &Rendering<'_>, chosen: &[Option<MarkPosition>]) -> Option<Self> {
        let (messages, tools) = (&rendering.chat.messages, rendering.tools);
        let mut marked = rendering.messages.to_vec();
        let mut main = vec![None; messages.len()];
        for (i, position) in chosen.iter().enumerate() {
            let Some(position) = position else { continue };
            marked[i] = jinja(&with_marks(&messages[i], std::iter::once((i, position))));
            main[i] = Some((i, rest(&messages[i], position)));
        }
        let whole = rendering.of(&marked, tools)?;
        let found = (0..messages.len()).all(|i| !is_needed(&messages[i]) || whole.at(i).is_some());
        (found && whole.text == rendering.text).then_some(Self {
            messages: marked,
            tools: tools.clone(),
            main,
            whole,
        })
    }

    /// Position of the mark of message `i` in a rendering.
    fn at(&self, seen: &Rendered, i: usize) -> Option<usize> {
        seen.at(self.main.get(i)?.as_ref()?.0)
    }

    /// End of message `i` in a rendering: the mark plus the rest of the message.
    fn anchor(&self, seen: &Rendered, i: usize) -> Option<usize> {
        self.behind(seen, i, self.at(seen, i)?)
    }

    /// End of message `i` in a rendering, with its mark at `at`.
    fn behind(&self, seen: &Rendered, i: usize, at: usize) -> Option<usize> {
        let rest = &self.main.get(i)?.as_ref()?.1;
        seen.text[at..].starts_with(rest.as_str()).then_some(at + rest.len())
    }

    /// Mark and end of message `i` in the whole text. A later message may repeat the marked string (the name of a
    /// call, in its result): as many marks then count as the text up to the message has.
    fn own(&self, i: usize, rendering: &Rendering<'_>) -> Option<(usize, usize)> {
        let (id, whole) = (self.main.get(i)?.as_ref()?.0, &self.whole);
        let repeats = i + 1 < self.messages.len() && whole.all(id).count() > 1;
        let upto = repeats.then(|| (rendering.render)(&self.messages[..=i], &self.tools, false, true).ok());
        let count = upto.flatten().map_or(0, |text| Rendered::new(&text).all(id).count());
        let at = count.checked_sub(1).and_then(|last| whole.all(id).nth(last)).or_else(|| whole.at(id))?;
        Some((at, self.behind(whole, i, at)?))
    }

    /// The last message in a rendering (`None` if no mark appears), and the text after it.
    fn tail<'a>(&self, seen: &'a Rendered) -> Option<(Option<usize>, &'a str)> {
        match seen.marks.iter().rev().find_map(|(id, _)| self.message(*id)) {
            None => Some((None, &seen.text)),
            Some(i) => Some((Some(i), &seen.text[self.anchor(seen, i)?..])),
        }
    }

    /// The message located by a mark.
    fn message(&self, id: usize) -> Option<usize> {
        self.main.iter().position(|m| m.as_ref().is_some_and(|m| m.0 == id))
    }

    /// Marks in a range of the text.
    fn ids<'a>(&'a self, range: &'a Range<usize>) -> impl Iterator<Item = usize> + 'a {
        let marks = &self.whole.marks;
        let first = marks.partition_point(|m| m.1 <= range.start);
        marks[first..].iter().take_while(move |m| m.1 <= range.end).map(|m| m.0)
    }

    /// Messages with marks in a range of the text.
    pub fn within<'a>(
        &'a self,
        fragments: &'a [Fragment],
        range: &'a Range<usize>,
    ) -> impl Iterator<Item = usize> + 'a {
        self.ids(range).filter_map(|id| fragments.get(id)?.message)
    }

    /// Start of the turn of message `i`, with its mark at `own`.
    fn start(&self, i: usize, own: usize, render: &Render<'_>) -> Result<usize, String> {
        let text = &self.whole.text;
        // first with the recipe's variables, then without, since earlier turns may not reflect them
        for variables in [true, false] {
            let Ok(prompt) = render(&self.messages[..i], &self.tools, true, variables) else { continue };
            let prompt = Rendered::new(&prompt);
            let Some((before, header)) = self.tail(&prompt) else { continue };
            let Some(from) = before.map_or(Some(0), |m| self.anchor(&self.whole, m)) else { continue };
            if text[from..].starts_with(header) && !(header.is_empty() && i == 0) {
                return Ok(from + header.len());
            }
            if let Some(start) = self.start_before_reasoning(i, before, from, header, render) {
                return Ok(start);
            }
        }
        self.start_by_search(i, own, render)
            .ok_or_else(|| unclear(i, "the turns before it do not end as they do in the whole conversation"))
    }

    /// Handles a generation prompt that opens the reasoning (`<think>`) although the template drops it from
    /// earlier turns. The header of a plain reply is then the common prefix of both.
    fn start_before_reasoning(
        &self,
        i: usize,
        before: Option<usize>,
        from: usize,
        header: &str,
        render: &Render<'_>,
    ) -> Option<usize> {
        let own = self.main[i].as_ref()?.0;
        let mut neutral = self.messages.clone();
        neutral[i] = jinja(&serde_json::json!({ "role": "assistant", "content": format!("{}.", mark(own)) }));
        let neutral = Rendered::new(&render(&neutral, &self.tools, false, true).ok()?);
        let anchor = before.map_or(Some(0), |m| self.anchor(&neutral, m))?;
        let plain = neutral.text.get(anchor..neutral.at(own)?)?;
        let fits = !plain.is_empty() && header.starts_with(plain);
        (fits && self.whole.text[from..].starts_with(plain)).then_some(from + plain.len())
    }

    /// Handles a conversation opened by the assistant, since many templates cannot render an empty prefix:
    /// takes the generation prompt as rendered after this message, if it occurs exactly once before the
    /// message.
    fn start_by_search(&self, i: usize, own: usize, render: &Render<'_>) -> Option<usize> {
        if (0..i).any(|m| self.at(&self.whole, m).is_some()) {
            return None;
        }
        let without = render(&self.messages[..=i], &self.tools, false, true).ok()?;
        let with = render(&self.messages[..=i], &self.tools, true, true).ok()?;
        let prompt = with.strip_prefix(without.as_str()).filter(|p| !p.trim().is_empty())?;
        let mut found = self.whole.text[..own].match_indices(prompt);
        match (found.next(), found.next()) {
            (Some((at, _)), None) => Some(at + prompt.len()),
            _ => None,
        }
    }

    /// End of the turn of message `i`, with content ending at `own`; and whether only a next message would end it.
    fn end(&self, i: usize, own: usize, rendering: &Rendering<'_>) -> Result<(usize, bool), String> {
        let (text, count) = (&self.whole.text, rendering.chat.messages.len());
        let stop = rendering.stop(text, own);
        let or_stop = |why: &str| stop.map(|end| (end, false)).ok_or_else(|| unclear(i, why));
        let upto;
        let seen = if i + 1 == count {
            &self.whole
        } else {
            match (rendering.render)(&self.messages[..=i], &self.tools, false, true) {
                Ok(last) => upto = Rendered::new(&last),
                Err(e) => return or_stop(&format!("up to it, the template says: {e}")),
            }
            &upto
        };
        let Some(from) = self.anchor(seen, i) else {
            return or_stop("it is not there without what follows");
        };
        let closing = seen.text[from..].trim_end();
        if closing.is_empty() {
            if i + 1 == count {
                return Ok((own, true));
            }
            return or_stop("nothing is written at its end, so a model could not learn to stop");
        }
        if !text[own..].starts_with(closing) {
            if rendering.stops.iter().any(|s| s == closing.trim_start()) {
                return Ok((stop.unwrap_or(own), false));
            }
            return or_stop("its end is written otherwise when a message follows");
        }
        let end = own + closing.len();
        if rendering.stops.iter().any(|s| closing.contains(s.as_str())) {
            return Ok((end, false));
        }
        let open = i + 1 == count && self.ends_by_header(i, closing, rendering);
        Ok((rendering.stop(text, end).unwrap_or(end), open))
    }

    /// Whether a message behind the last one, `i`, would end its turn: an end-of-sequence token behind `closing`.
    fn ends_by_header(&self, i: usize, closing: &str, rendering: &Rendering<'_>) -> bool {
        let mut messages = self.messages.clone();
        messages.push(jinja(&serde_json::json!({ "role": "user", "content": "." })));
        rendering.of(&messages, &self.tools).is_some_and(|seen| {
            let own = self.anchor(&seen, i).filter(|own| seen.text[*own..].starts_with(closing));
            own.is_some_and(|own| rendering.stop(&seen.text, own + closing.len()).is_some())
        })
    }
}
