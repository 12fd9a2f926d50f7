//! Notes on usable rows: text lost or changed by the template, and unread keys. Counted by kind, reported
//! once per kind.

use ft_base::error::Location;
use ft_base::terminal::plural;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// A finding about a row, reported to the user.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Note {
    /// A row key not read by the format.
    RowKey { key: String, format: Cow<'static, str> },
    /// A text written by programs for a missing value, in a key that is read.
    Missing { key: String, text: String },
    /// A message key not rendered by the chat template.
    MessageKey(String),
    /// Reasoning removed by the chat template.
    Reasoning,
    /// A message of this role dropped by the chat template, although rendered in a shorter conversation.
    LeftOut(String),
    /// A marker of the chat template without a token in the tokenizer.
    Marker(String),
    /// A supervised span that starts or ends inside a token.
    Edge,
    /// Tokens that merge across the end of a prompt.
    Merged,
    /// A last turn without an end in the text.
    Open,
    /// An end-of-sequence token behind a `{% generation %}` block.
    StopOutside,
    /// A pair of equal completions.
    Equal,
    /// A rated completion, desirable or not.
    Rated(bool),
    /// A file without rows, among others.
    NoRows,
    /// A divided document, with pieces without a target.
    Untrained,
}

impl Note {
    /// A sentence about `rows` rows, or files.
    fn told(&self, rows: usize) -> String {
        let s = plural(rows, "row");
        match self {
            Note::RowKey { key, format } => {
                format!("{s} with the key {key:?}, which format {format:?} does not read")
            }
            Note::Missing { key, text } => format!(
                "{s} with the text {text:?} as {key}, which programs write for a missing value: it is trained on as it \
                 stands"
            ),
            Note::MessageKey(key) => {
                format!("{s} whose messages have the key {key:?}, which the chat template does not write")
            }
            Note::Reasoning => {
                format!("{s} in whose text the chat template leaves out reasoning: it is not trained on")
            }
            Note::LeftOut(role) => format!(
                "{s} in whose text the chat template leaves out the {role} message: it writes that only where a \
                 conversation ends earlier, as in use, so training does not see it{}",
                if role == "assistant" { "" } else { "\n  hint: put its text into the first user message" }
            ),
            Note::Marker(marker) => format!(
                "{s} in which the chat template writes {marker:?}, for which the tokenizer has no token: it is spelled \
                 in pieces\n  hint: the template may belong to another tokenizer (data.chat_template)"
            ),
            Note::Edge => format!(
                "{s} in which what is supervised begins or ends inside a token: such a token is not supervised\n  \
                 hint: end turns with a special token of the tokenizer, and begin them behind one or behind a line \
                 break"
            ),
            Note::Merged => format!(
                "{s} in which tokens merge across the end of the prompt: the completion is supervised from the first \
                 of them\n  hint: end prompts with a line break or a special token"
            ),
            Note::Untrained => format!(
                "{s} in which pieces of data.max_length tokens have nothing supervised: they are left out"
            ),
            Note::Open => format!(
                "{s} in which the chat template writes no end behind the last answer: it trains no end of a turn\n  \
                 hint: conversations of several turns do, where the next header is an end-of-sequence token of the \
                 model"
            ),
            Note::StopOutside => format!(
                "{s} in which the chat template writes an end-of-sequence token behind a {{% generation %}} block: it \
                 is not supervised, so the model may not learn to stop\n  hint: a template with the token inside the \
                 block (data.chat_template)"
            ),
            Note::NoRows => format!("{} without rows", plural(rows, "file")),
            Note::Equal => {
                format!("{s} whose chosen and rejected are the same tokens: such a pair teaches nothing")
            }
            Note::Rated(label) => format!(
                "{s}, all of them, with label = {label}: without the other label there is nothing to tell apart\n  \
                 hint: add rows with label = {}, or train on these with task = \"sft\"",
                !label
            ),
        }
    }
}

/// Maximum number of kinds, since rows may have arbitrary keys.
const KINDS: usize = 40;

/// Counts of notes by kind, with the place of the first row.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Notes {
    /// Kinds in ascending order, with the number of rows.
    kinds: Vec<(Note, usize, Location)>,
    /// Number of notes beyond the maximum.
    more: usize,
}

impl Notes {
    /// Adds the notes of later rows.
    pub(crate) fn extend(&mut self, later: &Notes) {
        later.kinds.iter().for_each(|(note, rows, first)| self.count(note, *rows, first));
        self.more += later.more;
    }

    /// All recorded places, for updating file names.
    pub(crate) fn places(&mut self) -> impl Iterator<Item = &mut Location> {
        self.kinds.iter_mut().map(|(_, _, place)| place)
    }

    /// Counts the notes of a row, at most once per kind.
    pub(crate) fn add(&mut self, place: &Location, mut notes: Vec<Note>) {
        notes.sort();
        notes.dedup();
        notes.iter().for_each(|note| self.count(note, 1, place));
    }

    fn count(&mut self, note: &Note, rows: usize, first: &Location) {
        match self.kinds.binary_search_by(|kind| kind.0.cmp(note)) {
            Ok(i) => self.kinds[i].1 += rows,
            Err(_) if self.kinds.len() >= KINDS => self.more += rows,
            Err(i) => self.kinds.insert(i, (note.clone(), rows, first.clone())),
        }
    }

    /// Whether no notes were counted.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// One sentence per kind, with the place of the first row.
    pub fn told(&self) -> Vec<String> {
        let told = |(note, rows, first): &(Note, usize, Location)| {
            let text = note.told(*rows);
            let (text, hint) = text.split_at(text.find('\n').unwrap_or(text.len()));
            let the = if *rows == 1 { "" } else { "the first: " };
            format!("{text} ({the}{first}){hint}")
        };
        let more = (self.more > 0).then(|| format!("{} more such keys or markers are not shown", self.more));
        let is_key = |kind: &&(Note, usize, Location)| matches!(kind.0, Note::RowKey { .. });
        let has = |label| self.kinds.iter().any(|kind| kind.0 == Note::Rated(label));
        let both = has(true) && has(false);
        let is_told = |kind: &&_| !(is_key(kind) || both && matches!(kind.0, Note::Rated(_)));
        let others = self.kinds.iter().filter(is_told).map(told);
        let keys: Vec<_> = self.kinds.iter().filter(is_key).collect();
        let keys = match keys.as_slice() {
            [] => None,
            [one] => Some(told(one)),
            [(_, _, first), ..] => Some(Self::told_keys(&keys, first)),
        };
        keys.into_iter().chain(others).chain(more).collect()
    }

    /// One sentence about several unread keys.
    fn told_keys(keys: &[&(Note, usize, Location)], first: &Location) -> String {
        let name = |(note, ..): &&(Note, usize, Location)| match note {
            Note::RowKey { key, .. } => Some(format!("{key:?}")),
            _ => None,
        };
        let names: Vec<String> = keys.iter().filter_map(name).collect();
        let rows = keys.iter().map(|k| k.1).max().unwrap_or_default();
        let s = plural(rows, "row");
        format!(
            "{s} with the keys {}, which their format does not read (the first: {first})",
            names.join(", ")
        )
    }
}
