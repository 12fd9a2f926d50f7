//! Words and slices of `[data]`.

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
        /// `input_ids`, `labels`, `weights`.
        Tokens = "tokens",
        /// `prompt`, `chosen`, `rejected` as texts or messages; or `prompt_ids`, `chosen_ids`, `rejected_ids`.
        Preference = "preference",
        /// `prompt` and `completion`, `messages`, or `prompt_ids` and `completion_ids`; `label` (true or false).
        Unpaired = "unpaired",
        /// `text`, `prompt`, `messages` or `input_ids`, and `label`: the number or name of a class.
        Labeled = "labeled",
    }
}

impl Format {
    /// The supported masks; the first is the default.
    pub fn masks(self) -> &'static [Mask] {
        match self {
            Format::Messages => &[Mask::Assistant, Mask::Last, Mask::None],
            Format::Alpaca | Format::Completion => &[Mask::Completion, Mask::None],
            Format::Text | Format::Tokens | Format::Labeled => &[Mask::None],
            Format::Preference | Format::Unpaired => &[Mask::Completion],
        }
    }

    /// Whether rows compare or rate completions.
    pub fn is_preference(self) -> bool {
        matches!(self, Format::Preference | Format::Unpaired)
    }

    /// Whether only certain tasks read the rows.
    pub fn is_of_a_task(self) -> bool {
        self.is_preference() || self == Format::Labeled
    }

    /// Whether `form` chooses between the chat template and plain text.
    pub fn has_forms(self) -> bool {
        self.is_template_default() || self.is_preference()
    }

    /// Whether rows go through the chat template by default, if the model has one.
    pub fn is_template_default(self) -> bool {
        matches!(self, Format::Alpaca | Format::Completion)
    }

    /// Keys of a row that the format reads, through the chat template or not.
    pub fn keys(self, chat: bool) -> &'static [&'static str] {
        match self {
            Format::Messages => &["messages", "conversations", "conversation", "tools", "system", "weight"],
            Format::Alpaca if chat => {
                &["instruction", "input", "output", "system", "history", "tools", "weight"]
            }
            Format::Completion if chat => &["prompt", "completion", "system", "tools", "weight"],
            Format::Alpaca => &["instruction", "input", "output", "system", "history", "weight"],
            Format::Completion => &["prompt", "completion", "weight"],
            Format::Text => &["text", "weight"],
            Format::Tokens => &[
                "input_ids",
                "labels",
                "attention_mask",
                "weights",
                "weight",
                "teacher_ids",
                "teacher_logits",
                "teacher",
            ],
            Format::Labeled => &[
                "text",
                "prompt",
                "input_ids",
                "messages",
                "conversations",
                "conversation",
                "tools",
                "system",
                "label",
                "weight",
            ],
            Format::Preference => &[
                "prompt",
                "chosen",
                "rejected",
                "prompt_ids",
                "chosen_ids",
                "rejected_ids",
                "tools",
                "system",
            ],
            Format::Unpaired => &[
                "prompt",
                "completion",
                "messages",
                "conversations",
                "conversation",
                "label",
                "prompt_ids",
                "completion_ids",
                "tools",
                "system",
            ],
        }
    }

    /// Keys of a row with a list or table in place of text.
    pub fn json_keys(self) -> impl Iterator<Item = &'static str> {
        fn is_json(key: &&str) -> bool {
            match *key {
                "messages" | "conversations" | "conversation" | "tools" | "history" => true,
                "labels" | "attention_mask" | "weights" | "teacher" | "teacher_logits" => true,
                key => key.ends_with("_ids"),
            }
        }
        self.keys(true).iter().copied().filter(is_json)
    }

    /// Names that `fields` can replace: keys of a row, and of its messages.
    pub fn fields(self, chat: bool) -> Vec<&'static str> {
        let mut names = self.keys(chat).to_vec();
        if self == Format::Messages || self.is_of_a_task() {
            names.extend(["role", "content"]);
        }
        names
    }
}

/// Targets of a score head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ScoreTargets {
    /// The head is the vocabulary's.
    #[default]
    None,
    /// One score, for pairs.
    Pairs,
    /// Classes with these names.
    Classes(Vec<String>),
}

impl ScoreTargets {
    /// Names of the head's outputs, as transformers has them; `None` for the vocabulary's head.
    pub fn labels(&self) -> Option<Vec<String>> {
        match self {
            ScoreTargets::None => None,
            ScoreTargets::Pairs => Some(numbered(1)),
            ScoreTargets::Classes(names) => Some(names.clone()),
        }
    }
}

/// Names of `n` outputs without names of their own, as transformers has them.
pub fn numbered(n: usize) -> Vec<String> {
    (0..n).map(|i| format!("LABEL_{i}")).collect()
}

words! {
    /// `data.*.form`
    pub enum Form {
        /// As a conversation, by the chat template.
        Chat = "chat",
        /// As one text: the prompt followed by the completion, or an Alpaca prompt.
        Plain = "plain",
    }
}

words! {
    /// `data.over_length`
    pub enum OverLength {
        /// Cut to `max_length`.
        Truncate = "truncate",
        /// Leave it out.
        Drop = "drop",
        /// Divide it into samples of `max_length` tokens, and a rest.
        Split = "split",
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

/// An end of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Of all rows.
    Open,
    /// Rows from the first, or from the last if below 0.
    Rows(i64),
    /// Percent of the rows, likewise.
    Percent(i64),
}

/// Consecutive rows of a source, as `split = "train[100:20%]"` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice(End, End);

impl Slice {
    /// All rows.
    pub const ALL: Slice = Slice(End::Open, End::Open);

    /// Splits the value of `split` into name and slice.
    ///
    /// # Errors
    /// The form of a slice, if it has another.
    pub fn parse(split: &str) -> Result<(&str, Slice), &'static str> {
        const FORM: &str = "a slice is [100:200], [:20%] or [-50:], behind the name of the split";
        let Some((name, inside)) = split.split_once('[') else { return Ok((split, Self::ALL)) };
        let (from, to) = inside.strip_suffix(']').and_then(|s| s.split_once(':')).ok_or(FORM)?;
        let end = |text: &str| {
            let text = text.trim();
            let (number, percent) = text.strip_suffix('%').map_or((text, false), |n| (n, true));
            match (text.is_empty(), number.parse::<i64>()) {
                (true, _) => Ok(End::Open),
                (_, Ok(n)) if percent && (-100..=100).contains(&n) => Ok(End::Percent(n)),
                (_, Ok(n)) if !percent => Ok(End::Rows(n)),
                _ => Err(FORM),
            }
        };
        Ok((name, Slice(end(from)?, end(to)?)))
    }

    /// Whether the rows depend on the number of all rows.
    pub fn needs_total(self) -> bool {
        let counted = |end: End| matches!(end, End::Percent(_)) || matches!(end, End::Rows(n) if n < 0);
        counted(self.0) || counted(self.1)
    }

    /// The rows of `total`; shares are rounded to the closest row, as in the `datasets` package.
    pub fn rows(self, total: usize) -> std::ops::Range<usize> {
        let at = |end: End, open: usize| {
            let n = match end {
                End::Open => return open,
                End::Rows(n) => n,
                End::Percent(p) => (p as f64 * total as f64 / 100.0).round_ties_even() as i64,
            };
            let last = i64::try_from(total).unwrap_or(i64::MAX);
            let from_first = if n < 0 { last.saturating_add(n) } else { n };
            usize::try_from(from_first.clamp(0, last)).unwrap_or(open)
        };
        let from = at(self.0, 0);
        from..at(self.1, total).max(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_those_of_the_datasets_package() {
        for (split, name, rows) in [
            ("train", "train", 0..10),
            ("train[:20%]", "train", 0..2),
            ("train[80%:]", "train", 8..10),
            ("test[2:5]", "test", 2..5),
            ("[-3:]", "", 7..10),
            ("train[:-10%]", "train", 0..9),
            ("train[25%:75%]", "train", 2..8),
            ("train[8:200]", "train", 8..10),
            ("train[5:2]", "train", 5..5),
        ] {
            let (found, slice) = Slice::parse(split).unwrap();
            assert_eq!((found, slice.rows(10)), (name, rows), "{split}");
        }
        let least = format!("train[:{}%]", i64::MIN);
        for bad in ["train[", "train[1]", "train[a:]", "train[:101%]", "train[:-101%]", "train[1:2]x", &least]
        {
            assert!(Slice::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn shares_and_rows_from_the_end_need_all_rows() {
        for (split, needs) in
            [("train", false), ("[0:2]", false), ("[:1%]", true), ("[-1:]", true), ("[:-1]", true)]
        {
            assert_eq!(Slice::parse(split).unwrap().1.needs_total(), needs, "{split}");
        }
    }
}
