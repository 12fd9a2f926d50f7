//! Words of `[data]`.

use super::checked::Checked;
use super::field::{Field, Formatted};
use super::macros::{doc, words};
use crate::syntax::quote;

words! {
    /// `data.*.format`
    pub enum Format {
        /// `{"messages": [{"role", "content"}]}`, or ShareGPT's `conversations`.
        Messages = "messages",
        /// `instruction`, `input`, `output`.
        Alpaca = "alpaca",
        /// `prompt`, `completion`.
        Completion = "completion",
        /// `text`.
        Text = "text",
        /// `input_ids`, `labels`.
        Tokens = "tokens",
    }
}

impl Format {
    /// The supported masks; the first is the default.
    pub fn masks(self) -> &'static [Mask] {
        match self {
            Format::Messages => &[Mask::Assistant, Mask::Last, Mask::None],
            Format::Alpaca | Format::Completion => &[Mask::Completion, Mask::None],
            Format::Text | Format::Tokens => &[Mask::None],
        }
    }
}

words! {
    /// `data.over_length`
    pub enum OverLength {
        /// Cut to `max_length`.
        Truncate = "truncate",
        /// Leave it out.
        Drop = "drop",
        /// Stop.
        Error = "error",
    }
}

words! {
    /// `data.on_bad_row`
    pub enum OnBadRow {
        /// Stop.
        Error = "error",
        /// Leave it out and count it.
        Skip = "skip",
    }
}

words! {
    /// `data.mask`
    pub enum Mask {
        /// The assistant's turns.
        Assistant = "assistant",
        /// The assistant's last turn.
        Last = "last",
        /// The completion.
        Completion = "completion",
        /// Every token.
        None = "none",
    }
}
