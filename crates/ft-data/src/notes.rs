//! What training texts lose or change against what their rows say, where a run goes on all the same: counted by
//! kind, and told once each.

use ft_base::error::Place;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Something about a row that its author should know.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Note {
    /// The row has a key that the format does not read.
    RowKey { key: String, format: Cow<'static, str> },
    /// A message has a key that the chat template does not write.
    MessageKey(String),
    /// The chat template takes what the assistant thought out of the text.
    Reasoning,
    /// The chat template writes the text of a message of this role in other places of a conversation, but not here.
    LeftOut(String),
    /// The chat template writes a marker that the tokenizer has no token for.
    Marker(String),
    /// What is supervised begins or ends in the middle of a token.
    Edge,
}

impl Note {
    /// A sentence; `rows` is how many rows it is about.
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

/// Kinds of notes that are kept; rows may have any keys.
const KINDS: usize = 40;

/// Notes with how many rows each is about, and the first of these.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Listed", into = "Listed")]
pub struct Notes {
    kinds: BTreeMap<Note, (usize, Place)>,
    /// Notes of kinds beyond those that are kept.
    more: usize,
}

/// [`Notes`] as they are written.
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
    /// Adds the notes of rows that come after these.
    pub(super) fn extend(&mut self, later: &Notes) {
        for (note, (rows, first)) in &later.kinds {
            if self.kinds.len() < KINDS || self.kinds.contains_key(note) {
                self.kinds.entry(note.clone()).or_insert_with(|| (0, first.clone())).0 += rows;
            } else {
                self.more += rows;
            }
        }
        self.more += later.more;
    }

    /// The places that are told.
    pub(super) fn places(&mut self) -> impl Iterator<Item = &mut Place> {
        self.kinds.values_mut().map(|(_, place)| place)
    }

    /// Counts the notes of a row; a kind counts once a row.
    pub(super) fn add(&mut self, place: &Place, mut notes: Vec<Note>) {
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

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// A sentence for each kind, with the place of its first row.
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
