//! Schema of a source: format, field names and mask.

use super::keys::read_by;
use crate::error::Error;
use ft_recipe::{Format, Mask};
use serde_json::{Map, Value};

/// Format, field names and mask of a source.
pub(crate) struct Schema {
    pub format: Format,
    pub mask: Mask,
    fields: std::collections::BTreeMap<String, String>,
    /// Keys read from a row, as named in the file.
    reads: Vec<String>,
}

impl Schema {
    /// Builds the schema of a source; `mask` is `data.mask`.
    ///
    /// # Errors
    /// A mask or field unknown to the format.
    pub fn new(source: &ft_recipe::Source, mask: Option<Mask>) -> Result<Self, Error> {
        let fail = |message| Err(Error::recipe(source, message));
        let Some(format) = source.format else {
            return fail("the source has no format, and none was found for it".into());
        };
        let possible = format.masks();
        let name = format.word();
        let mut names = read_by(format).to_vec();
        if format == Format::Messages {
            names.extend(["role", "content"]);
        }
        let chosen = source.mask.or(mask).unwrap_or(possible[0]);
        if !possible.contains(&chosen) {
            let can = possible.iter().map(|m| format!("{:?}", m.word())).collect::<Vec<_>>().join(" or ");
            return fail(format!(
                "format {name:?} cannot do mask = {:?}, only {can}; set mask in this source",
                chosen.word()
            ));
        }
        if let Some(unknown) = source.fields.keys().find(|k| !names.contains(&k.as_str())) {
            return fail(format!("format {name:?} has no field {unknown:?}; it has {}", names.join(", ")));
        }
        let mut schema = Self { format, mask: chosen, fields: source.fields.clone(), reads: Vec::new() };
        schema.reads = read_by(format).iter().map(|n| schema.name(n).to_string()).collect();
        Ok(schema)
    }

    /// A schema for inspecting a row of unknown format.
    pub fn of_any() -> Self {
        Self { format: Format::Text, mask: Mask::None, fields: Default::default(), reads: Vec::new() }
    }

    /// Whether a field, as named in the file, contains a list or object instead of text.
    pub(crate) fn holds_json(&self, field: &str) -> bool {
        let lists: &[&str] = match self.format {
            Format::Messages => &["messages", "conversations", "tools"],
            Format::Alpaca => &["history"],
            Format::Tokens => &["input_ids", "labels", "attention_mask"],
            Format::Completion | Format::Text => &[],
        };
        lists.iter().any(|name| self.name(name) == field)
    }

    /// Whether a field, as named in the file, is read.
    pub(crate) fn reads(&self, field: &str) -> bool {
        self.reads.iter().any(|n| n == field)
    }

    pub(crate) fn name<'a>(&'a self, name: &'a str) -> &'a str {
        self.fields.get(name).map_or(name, String::as_str)
    }

    pub(super) fn is_list(&self, name: &str) -> bool {
        [self.name("messages"), self.name("conversations")].contains(&name)
    }

    /// The key of a row's message list.
    pub(super) fn list_of<'a>(&'a self, row: &Map<String, Value>) -> &'a str {
        let (list, other) = (self.name("messages"), self.name("conversations"));
        if row.get(list).is_none_or(Value::is_null) && row.contains_key(other) { other } else { list }
    }
}
