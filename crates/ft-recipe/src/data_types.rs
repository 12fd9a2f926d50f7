//! Types of `[data]` values.

use super::check::Checked;
use super::keys::{Data, Source};
use super::table::{Field, Written, doc, words};
use super::tree::quote;

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

impl Data {
    /// Whether evaluation data is configured.
    pub fn evaluates(&self) -> bool {
        self.eval_share > 0.0 || !self.eval.is_empty()
    }

    /// The sources of the training or evaluation data. With `eval_share`, evaluation uses the training
    /// sources.
    pub fn sources(&self, part: Part) -> &[Source] {
        match part {
            Part::Eval if self.eval_share == 0.0 => &self.eval,
            _ => &self.train,
        }
    }
}

/// Training or evaluation data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// `data.train`.
    Train,
    /// `data.eval`, or the share `data.eval_share` of the training data.
    Eval,
}

impl Part {
    /// The recipe key that defines this part.
    pub fn key(self, data: &Data) -> &'static str {
        match self {
            Part::Train => "data.train",
            Part::Eval if data.eval_share > 0.0 => "data.eval_share",
            Part::Eval => "data.eval",
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
