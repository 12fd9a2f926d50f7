//! Notes on usable rows: text lost or changed by the template, and unread keys. Counted by kind, reported
//! once per kind.

use ft_base::error::Place;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// A finding about a row, reported to the user.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Note {
    /// A row key not read by the format.
    RowKey { key: String, format: Cow<'static, str> },
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
}

impl Note {
    /// A sentence about `rows` rows.
    fn told(&self, rows: usize) -> String {
        let s = if rows == 1 { "1 row" } else { &format!("{rows} rows") };
        match self {
            Note::RowKey { key, format } => {
                format!("{s} with the key {key:?}, which format {format:?} does not read")
            }
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
                "{s} in which the chat template writes {marker:?}, for which the tokenizer has no token: it is spelt \
                 in pieces\n  hint: the template may belong to another tokenizer (data.chat_template)"
            ),
            Note::Edge => format!(
                "{s} in which what is supervised begins or ends inside a token: such a token is not supervised\n  \
                 hint: end turns with a special token of the tokenizer, and begin them behind one or behind a line \
                 break"
            ),
        }
    }
}

/// Maximum number of kinds, since rows may have arbitrary keys.
const KINDS: usize = 40;

/// Counts of notes by kind, with the place of the first row.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Listed", into = "Listed")]
pub struct Notes {
    kinds: BTreeMap<Note, (usize, Place)>,
    /// Number of notes beyond the maximum.
    more: usize,
}

/// Serialized form of [`Notes`].
#[derive(Serialize, Deserialize)]
struct Listed {
    kinds: Vec<(Note, usize, Place)>,
    more: usize,
}

impl From<Listed> for Notes {
    fn from(l: Listed) -> Self {
        Self { kinds: l.kinds.into_iter().map(|(n, rows, at)| (n, (rows, at))).collect(), more: l.more }
    }
}

impl From<Notes> for Listed {
    fn from(n: Notes) -> Self {
        Self { kinds: n.kinds.into_iter().map(|(n, (rows, at))| (n, rows, at)).collect(), more: n.more }
    }
}

impl Notes {
    /// Adds the notes of later rows.
    pub(crate) fn extend(&mut self, later: &Notes) {
        for (note, (rows, first)) in &later.kinds {
            if self.kinds.len() < KINDS || self.kinds.contains_key(note) {
                self.kinds.entry(note.clone()).or_insert_with(|| (0, first.clone())).0 += rows;
            } else {
                self.more += rows;
            }
        }
        self.more += later.more;
    }

    /// All recorded places, for updating file names.
    pub(crate) fn places(&mut self) -> impl Iterator<Item = &mut Place> {
        self.kinds.values_mut().map(|(_, place)| place)
    }

    /// Counts the notes of a row, at most once per kind.
    pub(crate) fn add(&mut self, place: &Place, mut notes: Vec<Note>) {
        notes.sort();
        notes.dedup();
        for note in notes {
            if self.kinds.len() < KINDS || self.kinds.contains_key(&note) {
                self.kinds.entry(note).or_insert_with(|| (0, place.clone())).0 += 1;
            } else {
                self.more += 1;
            }
        }
    }

    /// Whether no notes were counted.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// One sentence per kind, with the place of the first row.
    pub fn told(&self) -> Vec<String> {
        let told = |(note, (rows, first)): (&Note, &(usize, Place))| {
            let text = note.told(*rows);
            let (text, hint) = text.split_once('\n').map_or((text.as_str(), None), |(t, h)| (t, Some(h)));
            let first = if *rows == 1 { format!("({first})") } else { format!("(the first: {first})") };
            match hint {
                Some(hint) => format!("{text} {first}\n{hint}"),
                None => format!("{text} {first}"),
            }
        };
        let more = (self.more > 0).then(|| format!("{} more such keys or markers are not shown", self.more));
        self.kinds.iter().map(told).chain(more).collect()
    }
}
