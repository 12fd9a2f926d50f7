//! Rows of the formats `preference`, `unpaired` and `labeled`.
//!
//! A row has token ids, texts, or messages. A missing prompt is the common beginning of chosen and rejected. In form
//! "chat" texts are messages too: the prompt a user's, the completions an assistant's.

use super::example::IGNORE_INDEX;
use super::keys::says_nothing;
use super::messages::Chat;
use super::sample::Sample;
use super::schema::Schema;
use super::values::{brief, kind, missing};
use serde_json::{Map, Value, json};

type Row = Map<String, Value>;

/// Error of messages in form "plain".
const NEEDS_TEMPLATE: &str = "the row holds messages, which need a chat template\n  hint: form = \"chat\"";
/// Start of an answer in texts of dialogues, as in Anthropic's data.
const ANSWER: &str = "\n\nAssistant:";
/// Other names of the prompt.
pub(crate) const PROMPTS: &[&str] =
    &["question", "query", "instruction", "input", "conversations", "conversation"];

impl Schema {
    /// Chosen and rejected of a row.
    pub(super) fn pair(&self, row: &Row) -> Result<Sample, String> {
        let ids = ["prompt_ids", "chosen_ids", "rejected_ids"];
        if ids.iter().any(|name| row.contains_key(self.name(name))) {
            let [chosen, rejected] = [ids[1], ids[2]].map(|name| self.completion_ids(row, name));
            return Ok(Sample::Pair(Box::new([chosen?, rejected?])));
        }
        let (chosen, rejected) = (self.value(row, "chosen")?, self.value(row, "rejected")?);
        if self.takes_template(row, &[chosen, rejected])? {
            let both = [self.messages_of(chosen, "chosen")?, self.messages_of(rejected, "rejected")?];
            let prompt = match self.prompt_messages(row, &both[0])? {
                Some(prompt) => prompt,
                None => {
                    // as in TRL, each list keeps a message
                    let most = both[0].len().min(both[1].len()).saturating_sub(1);
                    let pairs = both[0].iter().zip(&both[1]).take(most);
                    let same = pairs.take_while(|(a, b)| a == b).count();
                    if same == 0 {
                        return Err(self.no_prompt(row, self.chat && chosen.is_string()));
                    }
                    both[0][..same].to_vec()
                }
            };
            let side =
                |name: &str, list| self.answered(row, &prompt, list).map_err(|e| format!("{name}: {e}"));
            let [chosen, rejected] = both;
            return Ok(Sample::Pair(Box::new([side("chosen", chosen)?, side("rejected", rejected)?])));
        }
        self.refuses_system(row)?;
        let (chosen, rejected) = (self.text(row, "chosen", true)?, self.text(row, "rejected", true)?);
        let completed = match row.get(self.name("prompt")) {
            Some(prompt) if !prompt.is_null() => {
                let prompt = self.text(row, "prompt", false)?;
                [chosen, rejected].map(|c| (prompt.to_string(), format!("{prompt}{c}")))
            }
            _ => {
                let prompt = common(chosen, rejected);
                if prompt.is_empty() {
                    return Err(self.no_prompt(row, false));
                }
                [chosen, rejected].map(|c| (prompt.to_string(), c.to_string()))
            }
        };
        Ok(Sample::Pair(Box::new(completed.map(|(prompt, text)| Sample::Completion(prompt, text)))))
    }

    /// A completion of a row, and whether it is desirable.
    pub(super) fn rated(&self, row: &Row) -> Result<Sample, String> {
        let desirable = self.label(row)?;
        let rated = |sample| Ok(Sample::Rated(Box::new(sample), desirable));
        if row.contains_key(self.name("prompt_ids")) || row.contains_key(self.name("completion_ids")) {
            return rated(self.completion_ids(row, "completion_ids")?);
        }
        if let Some(list) = self.rated_messages(row) {
            if self.plain {
                return Err(NEEDS_TEMPLATE.into());
            }
            let Some((answer, prompt)) = list.split_last() else { return Err(missing("messages", row)) };
            return rated(self.answered(row, prompt, vec![answer.clone()])?);
        }
        let completion = self.value(row, "completion")?;
        if self.takes_template(row, &[completion])? {
            let completion = self.messages_of(completion, "completion")?;
            let prompt = self.prompt_messages(row, &completion)?;
            let prompt = prompt.ok_or_else(|| missing(self.name("prompt"), row))?;
            return rated(self.answered(row, &prompt, completion)?);
        }
        self.refuses_system(row)?;
        let (prompt, completion) = (self.text(row, "prompt", false)?, self.text(row, "completion", true)?);
        rated(Sample::Completion(prompt.into(), format!("{prompt}{completion}")))
    }

    /// Messages of a row whose last one is the completion, as in LLaMA-Factory; `None` if prompt and completion are
    /// fields of their own.
    fn rated_messages<'a>(&self, row: &'a Row) -> Option<&'a Vec<Value>> {
        if self.has_parts(row) { None } else { row.get(self.list_of(row))?.as_array() }
    }

    /// Whether a row has a prompt or a completion, as a field of its own.
    pub(super) fn has_parts(&self, row: &Row) -> bool {
        let parts = ["prompt", "completion", "prompt_ids", "completion_ids"];
        parts.iter().any(|name| row.get(self.name(name)).is_some_and(|v| !v.is_null()))
    }

    /// The document of a row, and its class among `names`.
    pub(super) fn labeled(&self, row: &mut Row, names: &[String]) -> Result<Sample, String> {
        let class = self.class(row, names)?;
        let there = |name: &&str| row.get(self.name(name)).is_some_and(|v| !v.is_null());
        let found: Vec<&str> = ["text", "prompt", "input_ids"].into_iter().filter(there).collect();
        let list = self.list_of(row).to_string();
        let has_list = row.get(&list).is_some_and(|v| !v.is_null());
        let sample = match (found.as_slice(), has_list) {
            ([], true) => Sample::Chat(self.chat(row)?),
            (["input_ids"], false) => {
                let ids = self.numbers(row, "input_ids", 0)?;
                let labels = vec![IGNORE_INDEX; ids.len()];
                let ids = ids.into_iter().map(|i| i as u32).collect();
                Sample::Tokens { ids, labels, weights: Vec::new(), teacher: None }
            }
            ([name], false) if self.is_chat(row, &[]) => {
                let messages = self.messages_of(self.value(row, name)?, name)?;
                row.insert(list, Value::Array(messages));
                Sample::Chat(self.chat(row)?)
            }
            ([name], false) => Sample::Plain(self.text(row, name, true)?.to_string()),
            ([], false) => return Err(missing(self.name("text"), row)),
            _ => {
                let all = ["text", "prompt", &list, "input_ids"].map(|name| self.name(name)).join(", ");
                return Err(format!("more than one of {all}; a row has one text"));
            }
        };
        Ok(Sample::Labeled(Box::new(sample), class))
    }

    /// The class of a row, by name or number. Digits that are a name mean that class, as a number and as a text.
    fn class(&self, row: &Row, names: &[String]) -> Result<u32, String> {
        let (name, value) = (self.name("label"), self.value(row, "label")?);
        let named = |text: &str| names.iter().position(|n| n == text).map(|class| class as f64);
        let number = match value {
            // cells of tables are texts, of a column of floats "1.0"
            Value::String(text) => named(text).or_else(|| named(text.trim())).or_else(|| {
                let x = text.trim().parse::<f64>().ok()?;
                named(&x.to_string()).or(Some(x))
            }),
            Value::Bool(is) => {
                let same = |name: &String| name.eq_ignore_ascii_case(if *is { "true" } else { "false" });
                let number = (names.len() == 2).then_some(f64::from(u8::from(*is)));
                names.iter().position(same).map(|class| class as f64).or(number)
            }
            // columns of floats hold 1.0 for 1
            Value::Number(n) => {
                n.as_f64().and_then(|x| named(&n.to_string()).or(named(&x.to_string())).or(Some(x)))
            }
            Value::Array(_) => {
                return Err(format!(
                    "{name}: several labels of a text (multi-label classification) are not built"
                ));
            }
            _ => None,
        };
        let class = number.filter(|n| n.fract() == 0.0 && (0.0..names.len() as f64).contains(n));
        class.map(|n| n as u32).ok_or_else(|| {
            let few: Vec<String> = names.iter().take(8).map(|name| format!("{name:?}")).collect();
            let more = if names.len() > few.len() { ", .." } else { "" };
            let last = names.len().saturating_sub(1);
            let quote = if value.is_string() { "\"" } else { "" };
            format!(
                "{name}: {quote}{}{quote} is none of the classes: {}{more}, or 0 to {last}",
                brief(value),
                few.join(", ")
            )
        })
    }

    /// Replaces the number of a row's class by its name in the file.
    pub fn name_class(&self, row: &mut Value, names: &[String]) -> Result<(), String> {
        let label = row.get_mut(self.name("label"));
        let number = label.as_ref().and_then(|label| label.as_u64());
        if let (Some(label), Some(number)) = (label, number) {
            let name = usize::try_from(number).ok().and_then(|n| names.get(n));
            let name = name.ok_or_else(|| {
                format!(
                    "{}: the file names the classes {}, and none {number}",
                    self.name("label"),
                    names.join(", ")
                )
            })?;
            *label = name.as_str().into();
        }
        Ok(())
    }

    /// Error of a pair without a prompt, and without a common beginning: of messages, if `texts` are to become such.
    fn no_prompt(&self, row: &Row, texts: bool) -> String {
        let why = missing(self.name("prompt"), row);
        let other = PROMPTS.iter().find(|name| row.contains_key(**name));
        let hint = match other {
            Some(name) => format!("\n  hint: fields = {{ prompt = {name:?} }} takes the prompt from there"),
            None if texts => {
                "\n  hint: form = \"plain\" takes the text that chosen and rejected begin with".into()
            }
            None => String::new(),
        };
        let but = match texts {
            true => "form = \"chat\" makes the user's message of it",
            false => "chosen and rejected begin with nothing in common",
        };
        format!("{why}, and {but}{hint}")
    }

    /// Refuses keys of a row of texts that only a chat template writes.
    fn refuses_system(&self, row: &Row) -> Result<(), String> {
        let says = |name: &&str| row.get(*name).is_some_and(|v| !says_nothing(v));
        match [self.name("system"), self.name("tools")].into_iter().find(says) {
            Some(name) => Err(format!(
                "{name}: texts go without a chat template, which would write it\n  hint: form = \"chat\" takes texts \
                 through the template; or write it into prompt"
            )),
            None => Ok(()),
        }
    }

    fn value<'a>(&self, row: &'a Row, name: &str) -> Result<&'a Value, String> {
        let name = self.name(name);
        match row.get(name) {
            None => Err(missing(name, row)),
            Some(Value::Null) => Err(format!("{name} is null")),
            Some(value) => Ok(value),
        }
    }

    fn label(&self, row: &Row) -> Result<bool, String> {
        let name = self.name("label");
        let value = self.value(row, "label")?;
        // cells of tables are texts
        let text = value.as_str().unwrap_or_default().trim();
        match (value, value.as_f64().or_else(|| text.parse().ok())) {
            (Value::Bool(label), _) => Ok(*label),
            (_, Some(0.0)) => Ok(false),
            (_, Some(1.0)) => Ok(true),
            _ if text.eq_ignore_ascii_case("true") => Ok(true),
            _ if text.eq_ignore_ascii_case("false") => Ok(false),
            _ => Err(format!("{name}: {} is neither true nor false", brief(value))),
        }
    }

    /// Ids of prompt and completion; the completion is supervised.
    fn completion_ids(&self, row: &Row, name: &str) -> Result<Sample, String> {
        let (prompt, completion) = (self.numbers(row, "prompt_ids", 0)?, self.numbers(row, name, 0)?);
        if completion.is_empty() {
            return Err(format!("{} is empty", self.name(name)));
        }
        let labels = prompt.iter().map(|_| IGNORE_INDEX).chain(completion.iter().copied()).collect();
        let ids = prompt.into_iter().chain(completion).map(|i| i as u32).collect();
        Ok(Sample::Tokens { ids, labels, weights: Vec::new(), teacher: None })
    }

    /// Whether a row goes through the chat template: by its form, or since it holds messages.
    fn takes_template(&self, row: &Row, completions: &[&Value]) -> Result<bool, String> {
        let is_chat = self.is_chat(row, completions);
        if is_chat && self.plain {
            return Err(NEEDS_TEMPLATE.into());
        }
        Ok(is_chat || self.chat)
    }

    /// Whether a row holds messages.
    fn is_chat(&self, row: &Row, completions: &[&Value]) -> bool {
        let prompt = row.get(self.name("prompt"));
        prompt.into_iter().chain(completions.iter().copied()).any(|v| v.is_array() || v.is_object())
    }

    /// Messages of a field: a list, one message, or the text of an answer.
    fn messages_of(&self, value: &Value, name: &str) -> Result<Vec<Value>, String> {
        match value {
            Value::Array(list) => Ok(list.clone()),
            Value::Object(_) => Ok(vec![value.clone()]),
            // as in the other formats, the text of an answer is not empty
            Value::String(text) if self.chat && text.trim().is_empty() => {
                Err(format!("{} is empty", self.name(name)))
            }
            Value::String(text) => Ok(vec![self.said("assistant", text)]),
            other => Err(format!("{}: expected messages, found {}", self.name(name), kind(other))),
        }
    }

    /// A message of text, under the names of the source.
    fn said(&self, role: &str, text: &str) -> Value {
        json!({self.name("role"): role, self.name("content"): text})
    }

    /// Messages of the prompt, without the ones repeated in `completion`; `None` without a prompt.
    fn prompt_messages(&self, row: &Row, completion: &[Value]) -> Result<Option<Vec<Value>>, String> {
        let prompt = match row.get(self.name("prompt")) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(text)) => vec![self.said("user", text)],
            Some(other) => self.messages_of(other, "prompt")?,
        };
        let text = |m: &Value| m.get(self.name("content")).or(m.get("value")).cloned();
        let repeats = !prompt.is_empty()
            && completion.len() > prompt.len()
            && prompt.iter().zip(completion).all(|(a, b)| text(a) == text(b));
        Ok(Some(if repeats { completion[..prompt.len()].to_vec() } else { prompt }))
    }

    /// A conversation of prompt and completion. The answers of the completion are supervised.
    fn answered(&self, row: &Row, prompt: &[Value], completion: Vec<Value>) -> Result<Sample, String> {
        let list: Vec<Value> = if completion.starts_with(prompt) && completion.len() > prompt.len() {
            completion
        } else {
            prompt.iter().cloned().chain(completion).collect()
        };
        let all = list.len();
        let mut chat_row: Row = ["tools", "system"]
            .iter()
            .filter_map(|name| Some((self.name(name).to_string(), row.get(self.name(name))?.clone())))
            .collect();
        chat_row.insert(self.name("messages").into(), Value::Array(list));
        let mut chat: Chat = self.chat(&mut chat_row)?;
        // a system message of the row stands before the list
        let first = chat.messages.len().saturating_sub(all) + prompt.len();
        let answers = |i: &usize| chat.role(*i) == "assistant";
        let before: Vec<usize> = (0..first.min(chat.messages.len())).filter(answers).collect();
        if !(first..chat.messages.len()).any(|i| answers(&i) && !chat.unsupervised.contains(&i)) {
            return Err("no message of an assistant behind the prompt".into());
        }
        chat.unsupervised.retain(|i| *i >= first);
        chat.unsupervised.extend(before);
        chat.unsupervised.sort_unstable();
        Ok(Sample::Chat(chat))
    }
}

/// The prompt of two texts without one: up to the last common start of an answer, else all common text. As in TRL, each
/// text keeps a character, and a space before the difference.
fn common<'a>(a: &'a str, b: &str) -> &'a str {
    let same: usize = a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
    let differ = same < a.len().min(b.len());
    let last = a[..same].chars().next_back().filter(|_| !differ).map_or(0, char::len_utf8);
    let shared = &a[..same - last];
    match shared.rfind(ANSWER) {
        Some(at) => &shared[..at + ANSWER.len()],
        None if differ => shared.strip_suffix(' ').unwrap_or(shared),
        None => shared,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Results of `extract_prompt` of TRL 1.16, but for dialogues.
    #[test]
    fn each_text_of_a_pair_keeps_a_character() {
        for (a, b, prompt) in [
            ("Hello", "Hello world", "Hell"),
            ("Hello world", "Hello", "Hell"),
            ("Say é", "Say é", "Say "),
            ("Is it a", "Is it b", "Is it"),
            ("Is  a", "Is  b", "Is "),
            ("a", "ab", ""),
            (
                "\n\nHuman: Hi\n\nAssistant: a",
                "\n\nHuman: Hi\n\nAssistant: ab",
                "\n\nHuman: Hi\n\nAssistant:",
            ),
        ] {
            assert_eq!(common(a, b), prompt, "{a:?} {b:?}");
        }
    }
}
