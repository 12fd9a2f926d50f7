//! Conversion of a row to a sample.

use super::alpaca::{alpaca_turn, preamble};
use super::example::IGNORE_INDEX;
use super::keys::{of_row, says_nothing};
use super::messages::Chat;
use super::notes::Note;
use super::schema::Schema;
use super::teacher::TeacherLogits;
use super::values::{brief, kind, missing};
use ft_recipe::{Format, Mask, ScoreTargets};
use serde_json::{Map, Value};

/// A parsed row, before tokenization.
pub(crate) enum Sample {
    /// A conversation, to be rendered by the chat template.
    Chat(Chat),
    /// Texts followed by an end-of-sequence token, supervised from a byte offset.
    Text(Vec<(String, usize)>),
    /// Token ids; weights or none; values of a teacher.
    Tokens { ids: Vec<u32>, labels: Vec<i32>, weights: Vec<f32>, teacher: Option<TeacherLogits> },
    /// A text as it is, without an end-of-sequence token.
    Plain(String),
    /// A prompt, and the prompt with a completion.
    Completion(String, String),
    /// Chosen and rejected.
    Pair(Box<[Sample; 2]>),
    /// A completion, and whether it is desirable.
    Rated(Box<Sample>, bool),
    /// A document, and its class.
    Labeled(Box<Sample>, u32),
}

impl Schema {
    /// Converts a row to a sample, with a label of `scores` if the format has labels, and adds notes. Errors start
    /// with the path inside the row.
    pub fn sample(&self, row: Value, scores: &ScoreTargets, notes: &mut Vec<Note>) -> Result<Sample, String> {
        let Value::Object(mut row) = row else {
            return Err(format!("expected an object, found {}", kind(&row)));
        };
        self.open_lists(&mut row);
        // if both names of the message list occur, only one is read
        let list = self.list_of(&row);
        let other = |key: &str| {
            let unread = match self.format {
                Format::Messages => key != list,
                Format::Unpaired => key != list || self.has_parts(&row),
                _ => false,
            };
            unread && self.lists().contains(&key)
        };
        let read = |key: &str| self.reads(key) && !other(key);
        of_row(&row, (self, scores), &read, notes)?;
        match self.format {
            Format::Messages => Ok(Sample::Chat(self.chat(&mut row)?)),
            Format::Alpaca if self.chat => Ok(Sample::Chat(self.instruction_chat(&mut row)?)),
            Format::Completion if self.chat => Ok(Sample::Chat(self.prompt_chat(&mut row)?)),
            Format::Alpaca => self.alpaca(&row),
            Format::Completion => {
                self.refuses_lists(&row)?;
                let prompt = self.text(&row, "prompt", false)?.to_string();
                let completion = self.text(&row, "completion", true)?;
                Ok(Sample::Text(vec![self.joined(prompt, completion)]))
            }
            Format::Text => Ok(Sample::Text(vec![(self.text(&row, "text", true)?.to_string(), 0)])),
            Format::Preference => self.pair(&row),
            Format::Unpaired => self.rated(&row),
            Format::Labeled => match scores {
                ScoreTargets::Classes(names) => self.labeled(&mut row, names),
                _ => Err("a label, without the classes of task = \"classify\"".into()),
            },
            Format::Tokens => self.tokens(&row),
        }
    }

    /// Token ids, labels and what belongs to them.
    fn tokens(&self, row: &Map<String, Value>) -> Result<Sample, String> {
        let ids = self.numbers(row, "input_ids", 0)?;
        let labels = match row.get(self.name("labels")) {
            None | Some(Value::Null) => ids.clone(),
            Some(_) => self.numbers(row, "labels", IGNORE_INDEX)?,
        };
        if ids.len() != labels.len() {
            return Err(format!(
                "{} has {} numbers and {} has {}; they must be as many",
                self.name("input_ids"),
                ids.len(),
                self.name("labels"),
                labels.len()
            ));
        }
        if ids.is_empty() {
            return Err(format!("{} is empty", self.name("input_ids")));
        }
        self.attends(row, ids.len())?;
        let weights = self.weights(row, ids.len())?;
        let teacher = self.teacher_logits(row, ids.len())?;
        Ok(Sample::Tokens { ids: ids.into_iter().map(|i| i as u32).collect(), labels, weights, teacher })
    }

    /// Converts an instruction row, with earlier turns from `history`. All outputs are completions.
    fn alpaca(&self, row: &Map<String, Value>) -> Result<Sample, String> {
        let instruction = self.text(row, "instruction", true)?;
        let input = self.optional(row, "input")?;
        let system = Some(self.optional(row, "system")?).filter(|t| !t.is_empty());
        let output = self.text(row, "output", true)?;
        let mut turns = Vec::new();
        for (instruction, output) in self.history(row)? {
            turns.push(self.joined(alpaca_turn(instruction, ""), output));
        }
        turns.push(self.joined(alpaca_turn(instruction, input), output));
        for (i, (text, from)) in turns.iter_mut().enumerate() {
            let before = if i == 0 { preamble(system, input) } else { "\n\n".into() };
            // mask "none" supervises from the first byte
            *from = if *from == 0 { 0 } else { *from + before.len() };
            text.insert_str(0, &before);
        }
        Ok(Sample::Text(turns))
    }

    /// Refuses messages in a row of plain text.
    fn refuses_lists(&self, row: &Map<String, Value>) -> Result<(), String> {
        let list = |name: &&str| row.get(*name).is_some_and(Value::is_array);
        match [self.name("prompt"), self.name("completion")].into_iter().find(list) {
            Some(name) => Err(format!(
                "{name}: a list of messages, which needs a chat template\n  hint: form = \"chat\", with a model \
                 that has a template or data.chat_template"
            )),
            None => Ok(()),
        }
    }

    /// Earlier turns: pairs of instruction and output.
    pub(super) fn history<'a>(&self, row: &'a Map<String, Value>) -> Result<Vec<(&'a str, &'a str)>, String> {
        let name = self.name("history");
        let list = match row.get(name) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::String(s)) if s.trim().is_empty() => return Ok(Vec::new()),
            Some(Value::Array(list)) => list,
            Some(other) => return Err(format!("{name}: expected an array, found {}", kind(other))),
        };
        let turn = |(i, turn): (usize, &'a Value)| match turn.as_array().map(Vec::as_slice) {
            Some([Value::String(a), Value::String(b)]) if !a.trim().is_empty() && !b.trim().is_empty() => {
                Ok((a.as_str(), b.as_str()))
            }
            _ => Err(format!("{name}[{i}]: expected [\"an instruction\", \"its output\"]")),
        };
        list.iter().enumerate().map(turn).collect()
    }

    /// Weights of the tokens; empty if the row has none.
    fn weights(&self, row: &Map<String, Value>, tokens: usize) -> Result<Vec<f32>, String> {
        let name = self.name("weights");
        let list = match row.get(name) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::Array(list)) => list,
            Some(other) => {
                return Err(format!("{name}: expected an array of numbers, found {}", kind(other)));
            }
        };
        if list.len() != tokens {
            return Err(format!("{name} has {} numbers for {tokens} tokens", list.len()));
        }
        let of = |(i, v)| weight_of(v).map_err(|why| format!("{name}[{i}]: {why}"));
        list.iter().enumerate().map(of).collect()
    }

    /// Weight of all tokens of a row; 1 if the row has none.
    pub(crate) fn weight(&self, row: &Value) -> Result<f32, String> {
        let name = self.name("weight");
        match row.get(name).filter(|v| self.reads(name) && !says_nothing(v)) {
            None => Ok(1.0),
            // cells of tables are texts
            Some(Value::String(text)) => {
                let number =
                    text.trim().parse::<f64>().map_or_else(|_| Value::from(text.as_str()), Value::from);
                weight_of(&number).map_err(|why| format!("{name}: {why}"))
            }
            Some(value) => weight_of(value).map_err(|why| format!("{name}: {why}")),
        }
    }

    /// Refuses an `attention_mask` other than a 1 for every token.
    fn attends(&self, row: &Map<String, Value>, tokens: usize) -> Result<(), String> {
        if row.get(self.name("attention_mask")).is_none_or(Value::is_null) {
            return Ok(());
        }
        let mask = self.numbers(row, "attention_mask", 0)?;
        if mask.len() == tokens && mask.iter().all(|m| *m == 1) {
            return Ok(());
        }
        let name = self.name("attention_mask");
        Err(format!("{name}: it is not 1 for each of the {tokens} tokens; leave padding out of the row"))
    }

    fn joined(&self, mut prompt: String, completion: &str) -> (String, usize) {
        let from = if self.mask == Mask::None { 0 } else { prompt.len() };
        prompt.push_str(completion);
        (prompt, from)
    }

    /// The text of an optional field; empty if absent or blank.
    pub(super) fn optional<'a>(&self, row: &'a Map<String, Value>, name: &str) -> Result<&'a str, String> {
        match row.get(self.name(name)) {
            None | Some(Value::Null) => Ok(""),
            Some(_) => {
                Ok(Some(self.text(row, name, false)?).filter(|t| !t.trim().is_empty()).unwrap_or_default())
            }
        }
    }

    pub(super) fn text<'a>(
        &self,
        row: &'a Map<String, Value>,
        name: &str,
        needed: bool,
    ) -> Result<&'a str, String> {
        let name = self.name(name);
        match row.get(name) {
            None => Err(missing(name, row)),
            Some(Value::String(s)) if needed && s.trim().is_empty() => Err(format!("{name} is empty")),
            Some(Value::String(s)) => Ok(s),
            Some(other) => Err(format!("{name}: expected a string, found {}", kind(other))),
        }
    }

    /// Token ids, or the number `other`.
    pub(super) fn numbers(
        &self,
        row: &Map<String, Value>,
        name: &str,
        other: i32,
    ) -> Result<Vec<i32>, String> {
        let name = self.name(name);
        let list = match row.get(name) {
            None => return Err(missing(name, row)),
            Some(Value::Array(list)) => list,
            Some(v) => return Err(format!("{name}: expected an array of numbers, found {}", kind(v))),
        };
        let number = |(i, v): (usize, &Value)| {
            let n = v.as_i64().and_then(|n| i32::try_from(n).ok()).filter(|n| *n >= 0 || *n == other);
            n.ok_or_else(|| format!("{name}[{i}]: {} is not a token id", brief(v)))
        };
        list.iter().enumerate().map(number).collect()
    }
}

/// A weight: a number from 0 to the largest of 32 bits.
fn weight_of(value: &Value) -> Result<f32, String> {
    let number = value.as_f64().map(|w| w as f32).filter(|w| w.is_finite() && *w >= 0.0);
    number.ok_or_else(|| {
        format!("{} is not a weight; a weight is a number from 0 to {:e}", brief(value), f32::MAX)
    })
}
