//! Which part of a rendered conversation the assistant wrote: from behind the generation prompt to the end-of-turn
//! token, that included.
//!
//! Templates do not say (unless they use `{% generation %}`), and they do not compose either: Qwen3 takes the
//! thinking out of earlier turns, Mistral moves the system message to the last user turn. So the text is asked in
//! three ways:
//!
//! 1. The conversation is rendered again with an invisible mark inside each message. Taken out again, the marks must
//!    leave the very text of the first rendering, else other places for them are tried; so they show where each
//!    message stands, whatever look-alikes of special tokens the messages hold.
//! 2. The turns before the assistant's, rendered with the generation prompt, show what stands between the last mark
//!    before the turn and its first character. The conversation's text must continue with exactly that.
//! 3. The conversation up to the turn shows in the same way what stands behind its mark: the end of the turn.
//!
//! Where the text does not agree, there is an error: never a mask that is a guess.

use super::template::is_reserved;
use minijinja::Value as Jinja;
use minijinja::value::Serde;
use serde_json::Value;
use std::ops::Range;

/// A rendering: messages, whether with a generation prompt, whether with the recipe's variables.
pub(super) type Render<'a> = dyn Fn(&[Jinja], bool, bool) -> Result<String, String> + 'a;

const OPEN: char = '\u{FDD2}';
const CLOSE: char = '\u{FDD3}';
const DIGITS: u32 = 0xFDD4;

/// The conversation's text, and for each assistant turn the byte range that a loss on it supervises.
///
/// # Errors
/// What the template raises, and what makes the turns impossible to tell.
pub(super) fn assistant(
    messages: &[Value],
    render: &Render<'_>,
) -> Result<(String, Vec<Range<usize>>), String> {
    let plain: Vec<Jinja> = messages.iter().map(jinja).collect();
    let text = render(&plain, false, true)?;
    let turns: Vec<usize> = (0..messages.len()).filter(|&i| is_assistant(&messages[i])).collect();
    if turns.is_empty() {
        return Ok((text, Vec::new()));
    }
    let marked = Marked::place(messages, &plain, &text, render)?;
    let mut spans: Vec<Range<usize>> = Vec::new();
    for &i in &turns {
        let own =
            marked.anchor(&marked.whole, i).ok_or_else(|| unclear(i, "it cannot be found in the text"))?;
        let first = marked.whole.at(i).unwrap_or(own);
        let start = marked.start(i, first, render)?;
        let end = marked.end(i, own, messages.len(), render)?;
        if start > first || end < own || spans.last().is_some_and(|s| s.end > start) {
            return Err(unclear(i, "its turn overlaps another"));
        }
        spans.push(start..end);
    }
    Ok((text, spans))
}

fn unclear(i: usize, why: &str) -> String {
    format!(
        "messages[{i}]: the chat template does not show which text is this assistant turn ({why}); \
         use a template with {{% generation %}} blocks (data.chat_template), or data.mask = \"none\""
    )
}

fn is_assistant(message: &Value) -> bool {
    message.get("role").and_then(Value::as_str) == Some("assistant")
}

fn jinja(value: &Value) -> Jinja {
    Jinja::from(Serde(value))
}

/// A place for a mark: a string of the message, and the byte in it.
#[derive(Clone)]
struct Spot {
    pointer: String,
    at: usize,
}

/// Where a mark may stand in a message, the best first: behind the last visible character of what is certainly
/// written out.
fn spots(message: &Value) -> Vec<Spot> {
    let mut out = Vec::new();
    let end = |pointer: &str, out: &mut Vec<Spot>| {
        if let Some(text) = message.pointer(pointer).and_then(Value::as_str)
            && !text.trim().is_empty()
        {
            out.push(Spot { pointer: pointer.into(), at: text.trim_end().len() });
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
                    let texts = map.iter().filter(|(_, v)| v.is_string()).map(|(k, _)| k);
                    for k in texts.take(2) {
                        end(&format!("{at}/{}", k.replace('~', "~0").replace('/', "~1")), &mut out);
                    }
                }
                _ => end(&at, &mut out),
            }
        }
    }
    end("/reasoning_content", &mut out);
    if let Some(text) = message.get("content").and_then(Value::as_str) {
        let mut middle = text.len() / 2;
        while !text.is_char_boundary(middle) {
            middle -= 1;
        }
        out.push(Spot { pointer: "/content".into(), at: middle });
    }
    out
}

fn with_mark(message: &Value, spot: &Spot, id: usize) -> Value {
    let mut out = message.clone();
    if let Some(Value::String(text)) = out.pointer_mut(&spot.pointer) {
        text.insert_str(spot.at, &mark(id));
    }
    out
}

fn mark(id: usize) -> String {
    let mut out = String::from(OPEN);
    // 16 digits, each a noncharacter
    out.extend(format!("{id:x}").chars().filter_map(|c| char::from_u32(DIGITS + c.to_digit(16)?)));
    out.push(CLOSE);
    out
}

/// A rendering with its marks taken out: where they stood, in order of place.
struct Rendered {
    text: String,
    marks: Vec<(usize, usize)>,
}

impl Rendered {
    fn new(marked: &str) -> Self {
        let mut this = Self { text: String::with_capacity(marked.len()), marks: Vec::new() };
        let mut id = 0usize;
        for c in marked.chars() {
            match c {
                OPEN => id = 0,
                CLOSE => this.marks.push((id, this.text.len())),
                c if is_reserved(c) => id = id << 4 | (c as u32).wrapping_sub(DIGITS) as usize & 15,
                c => this.text.push(c),
            }
        }
        this
    }

    fn at(&self, id: usize) -> Option<usize> {
        self.marks.iter().rev().find(|m| m.0 == id).map(|m| m.1)
    }
}

/// The conversation with marks in it.
struct Marked {
    /// Each message with its mark.
    messages: Vec<Jinja>,
    /// What follows the mark inside its message, white space at the end aside.
    rests: Vec<String>,
    whole: Rendered,
}

impl Marked {
    fn place(messages: &[Value], plain: &[Jinja], text: &str, render: &Render<'_>) -> Result<Self, String> {
        let spots: Vec<Vec<Spot>> = messages.iter().map(spots).collect();
        let mut chosen: Vec<Option<Spot>> = spots.iter().map(|s| s.first().cloned()).collect();
        if let Some(whole) = Self::try_marks(messages, plain, &chosen, text, render) {
            return Ok(whole);
        }
        // one message after the other, until each has a mark that changes nothing and is there
        for i in 0..messages.len() {
            let mut alone: Vec<Jinja> = plain.to_vec();
            chosen[i] = spots[i].iter().find_map(|spot| {
                alone[i] = jinja(&with_mark(&messages[i], spot, i));
                let seen = Rendered::new(&render(&alone, false, true).ok()?);
                (seen.text == text && seen.at(i).is_some()).then(|| spot.clone())
            });
        }
        if let Some(i) = (0..messages.len()).find(|&i| chosen[i].is_none() && is_assistant(&messages[i])) {
            return Err(unclear(i, "the text does not hold it, or depends on every character of it"));
        }
        Self::try_marks(messages, plain, &chosen, text, render)
            .ok_or_else(|| unclear(0, "messages change how each other is written"))
    }

    fn try_marks(
        messages: &[Value],
        plain: &[Jinja],
        chosen: &[Option<Spot>],
        text: &str,
        render: &Render<'_>,
    ) -> Option<Self> {
        let mut marked = plain.to_vec();
        let mut rests = vec![String::new(); messages.len()];
        for (i, spot) in chosen.iter().enumerate() {
            let Some(spot) = spot else { continue };
            marked[i] = jinja(&with_mark(&messages[i], spot, i));
            let field = messages[i].pointer(&spot.pointer).and_then(Value::as_str).unwrap_or_default();
            rests[i] = field[spot.at..].trim_end().to_string();
        }
        let whole = Rendered::new(&render(&marked, false, true).ok()?);
        let found = (0..messages.len()).all(|i| !is_assistant(&messages[i]) || whole.at(i).is_some());
        (found && whole.text == text).then_some(Self { messages: marked, rests, whole })
    }

    /// The end of message `id` in a rendering: its mark, and what follows the mark inside the message.
    fn anchor(&self, seen: &Rendered, id: usize) -> Option<usize> {
        let at = seen.at(id)?;
        let rest = self.rests.get(id)?;
        seen.text[at..].starts_with(rest.as_str()).then_some(at + rest.len())
    }

    /// What a rendering writes behind the last of its messages, and which that is (none when it shows none).
    fn tail<'a>(&self, seen: &'a Rendered) -> Option<(Option<usize>, &'a str)> {
        match seen.marks.last() {
            None => Some((None, &seen.text)),
            Some(&(id, _)) => Some((Some(id), &seen.text[self.anchor(seen, id)?..])),
        }
    }

    /// Where the turn of message `i` begins, whose mark stands at `own`.
    fn start(&self, i: usize, own: usize, render: &Render<'_>) -> Result<usize, String> {
        let text = &self.whole.text;
        // with the recipe's variables and, for turns that were not written under them, without
        for variables in [true, false] {
            let Ok(prompt) = render(&self.messages[..i], true, variables) else { continue };
            let prompt = Rendered::new(&prompt);
            let Some((before, header)) = self.tail(&prompt) else { continue };
            let Some(from) = before.map_or(Some(0), |id| self.anchor(&self.whole, id)) else { continue };
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

    /// A generation prompt may open the reasoning (`<think>`) that the template leaves out of an earlier turn. What
    /// the template writes before a plain content is then the part of the prompt that both have.
    fn start_before_reasoning(
        &self,
        i: usize,
        before: Option<usize>,
        from: usize,
        header: &str,
        render: &Render<'_>,
    ) -> Option<usize> {
        let mut neutral = self.messages.clone();
        neutral[i] = jinja(&serde_json::json!({ "role": "assistant", "content": format!("{}.", mark(i)) }));
        let neutral = Rendered::new(&render(&neutral, false, true).ok()?);
        let anchor = before.map_or(Some(0), |id| self.anchor(&neutral, id))?;
        let plain = neutral.text.get(anchor..neutral.at(i)?)?;
        let fits = !plain.is_empty() && header.starts_with(plain);
        (fits && self.whole.text[from..].starts_with(plain)).then_some(from + plain.len())
    }

    /// For a conversation that the assistant opens, which many templates cannot render up to there: the generation
    /// prompt as it follows this message, if it stands before the message exactly once.
    fn start_by_search(&self, i: usize, own: usize, render: &Render<'_>) -> Option<usize> {
        if i > 0 && !self.whole.marks.iter().all(|m| m.0 >= i) {
            return None;
        }
        let without = render(&self.messages[..=i], false, true).ok()?;
        let with = render(&self.messages[..=i], true, true).ok()?;
        let prompt = with.strip_prefix(without.as_str()).filter(|p| !p.trim().is_empty())?;
        let mut found = self.whole.text[..own].match_indices(prompt);
        match (found.next(), found.next()) {
            (Some((at, _)), None) => Some(at + prompt.len()),
            _ => None,
        }
    }

    /// Where the turn of message `i` ends, whose text ends at `own`.
    fn end(&self, i: usize, own: usize, count: usize, render: &Render<'_>) -> Result<usize, String> {
        let text = &self.whole.text;
        let upto;
        let seen = if i + 1 == count {
            &self.whole
        } else {
            let last = render(&self.messages[..=i], false, true);
            upto =
                Rendered::new(&last.map_err(|e| unclear(i, &format!("up to it, the template says: {e}")))?);
            &upto
        };
        let from = self.anchor(seen, i).ok_or_else(|| unclear(i, "it is not there without what follows"))?;
        let closing = seen.text[from..].trim_end();
        if closing.is_empty() {
            return Err(unclear(i, "nothing is written at its end, so a model could not learn to stop"));
        }
        if !text[own..].starts_with(closing) {
            return Err(unclear(i, "its end is written otherwise when a message follows"));
        }
        Ok(own + closing.len())
    }
}
