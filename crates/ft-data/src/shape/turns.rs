//! Rows of prompt and completion, or of an instruction, as conversations.

use super::messages::Chat;
use super::schema::Schema;
use super::values::missing;
use ft_recipe::Mask;
use serde_json::{Map, Value};

impl Schema {
    /// Converts a row of prompt and completion: texts, or lists of messages. Only messages of the completion
    /// are supervised. Errors start with the path inside the row.
    pub(super) fn prompt_chat(&self, row: &mut Map<String, Value>) -> Result<Chat, String> {
        let mut chat = Chat::default();
        self.part(row, "prompt", "user", &mut chat)?;
        let prompt = chat.messages.len();
        if self.mask != Mask::None {
            chat.unsupervised = (0..prompt).filter(|i| chat.is_answer(*i)).collect();
        }
        self.part(row, "completion", "assistant", &mut chat)?;
        if self.mask != Mask::None && !(prompt..chat.messages.len()).any(|i| chat.is_answer(i)) {
            let name = self.name("completion");
            return Err(format!("{name}: no message of an assistant, so nothing to supervise"));
        }
        self.finished(chat, row)
    }

    /// Appends the text of a field as a message of `role`, or a list of messages.
    fn part(
        &self,
        row: &mut Map<String, Value>,
        field: &str,
        role: &str,
        chat: &mut Chat,
    ) -> Result<(), String> {
        let name = self.name(field).to_string();
        match row.get_mut(&name) {
            None => return Err(missing(&name, row)),
            Some(list @ Value::Array(_)) => return self.add(chat, &name, list.take()),
            Some(_) => {}
        }
        chat.push(role, self.text(row, field, role == "assistant")?, name);
        Ok(())
    }

    /// Converts an instruction row: earlier turns, then instruction and input as one message of the user. All
    /// outputs are supervised.
    pub(super) fn instruction_chat(&self, row: &mut Map<String, Value>) -> Result<Chat, String> {
        let mut chat = Chat::default();
        let history = self.name("history");
        for (i, (instruction, output)) in self.history(row)?.into_iter().enumerate() {
            chat.push("user", instruction, format!("{history}[{i}][0]"));
            chat.push("assistant", output, format!("{history}[{i}][1]"));
        }
        let input = self.optional(row, "input")?;
        let instruction = self.text(row, "instruction", input.is_empty())?;
        let asked = [instruction, input].into_iter().filter(|t| !t.trim().is_empty());
        let asked = asked.collect::<Vec<_>>().join("\n");
        chat.push("user", &asked, self.name("instruction").to_string());
        chat.push("assistant", self.text(row, "output", true)?, self.name("output").to_string());
        self.finished(chat, row)
    }
}
