//! Schema of a source: format, field names and mask.

use crate::error::Error;
use encoding_rs::Encoding;
use ft_recipe::{Form, Format, Mask};
use serde_json::{Map, Value};

/// Format, field names and mask of a source.
pub(crate) struct Schema {
    pub format: Format,
    /// Whether rows go through the chat template. Pairs and rated completions of messages do in any case.
    pub chat: bool,
    /// Whether pairs and rated completions are texts alone.
    pub plain: bool,
    pub mask: Mask,
    /// Encoding of the files, if the source names one.
    pub encoding: Option<&'static Encoding>,
    fields: std::collections::BTreeMap<String, String>,
    /// Keys read from a row, as named in the file.
    reads: Vec<String>,
}

/// The encoding that a source names.
fn encoding(source: &ft_recipe::Source) -> Result<Option<&'static Encoding>, Error> {
    let Some(name) = &source.encoding else { return Ok(None) };
    // names of Python's missing from the list
    let label = match name.to_ascii_lowercase().as_str() {
        "latin-1" => "latin1",
        "utf-8-sig" | "utf8-sig" => "utf-8",
        _ => name.as_str(),
    };
    let known = Encoding::for_label(label.as_bytes()).ok_or_else(|| {
        let some = "\"windows-1252\" (Latin-1 too), \"utf-16le\", \"shift_jis\", \"gb18030\", ..";
        Error::recipe(source, format!("encoding = {name:?} is no encoding of the WHATWG's list: {some}"))
    });
    known.map(Some)
}

impl Schema {
    /// Builds the schema of a source; `mask` is `data.mask`, `template` says whether the model has a chat
    /// template.
    ///
    /// # Errors
    /// A mask, form or field unknown to the format.
    pub fn new(source: &ft_recipe::Source, mask: Option<Mask>, template: bool) -> Result<Self, Error> {
        let fail = |message| Err(Error::recipe(source, message));
        let Some(format) = source.format else {
            return fail("the source has no format, and none was found for it".into());
        };
        let possible = format.masks();
        let name = format.word();
        if source.form.is_some() && !format.has_forms() {
            return fail(format!("form does nothing: rows of format {name:?} have one form only"));
        }
        let chat = source.is_chat(template);
        let names = format.fields(chat);
        let chosen = source.mask.or(mask).unwrap_or(possible[0]);
        if !possible.contains(&chosen) {
            let can = possible.iter().map(|m| format!("{:?}", m.word())).collect::<Vec<_>>().join(" or ");
            return fail(format!(
                "format {name:?} cannot do mask = {:?}, only {can}; set mask in this source",
                chosen.word()
            ));
        }
        if let Some(unknown) = source.fields.keys().find(|k| !names.contains(&k.as_str())) {
            let plain = if format.is_template_default() && !chat { " in form \"plain\"" } else { "" };
            return fail(format!(
                "format {name:?}{plain} has no field {unknown:?}; it has {}",
                names.join(", ")
            ));
        }
        let plain = format.is_preference() && source.form == Some(Form::Plain);
        let (encoding, fields, reads) = (encoding(source)?, source.fields.clone(), Vec::new());
        let mut schema = Self { format, chat, plain, mask: chosen, encoding, fields, reads };
        schema.reads = format.keys(chat).iter().map(|n| schema.name(n).to_string()).collect();
        Ok(schema)
    }

    /// A schema for inspecting a row of unknown format.
    ///
    /// # Errors
    /// An unknown encoding.
    pub fn of_any(source: &ft_recipe::Source) -> Result<Self, Error> {
        let (fields, reads) = Default::default();
        let (format, mask) = (Format::Text, Mask::None);
        Ok(Self { format, chat: false, plain: false, mask, encoding: encoding(source)?, fields, reads })
    }

    /// Whether a field, as named in the file, contains a list or object instead of text.
    pub(crate) fn holds_json(&self, field: &str) -> bool {
        self.format.json_keys().any(|name| self.name(name) == field)
    }

    /// Whether a field, as named in the file, is read.
    pub(crate) fn reads(&self, field: &str) -> bool {
        self.reads.iter().any(|n| n == field)
    }

    pub(crate) fn name<'a>(&'a self, name: &'a str) -> &'a str {
        self.fields.get(name).map_or(name, String::as_str)
    }

    /// The key of a row's message list.
    pub(super) fn list_of<'a>(&'a self, row: &Map<String, Value>) -> &'a str {
        let [list, others @ ..] = self.lists();
        let there = |name: &&str| row.get(*name).is_some_and(|v| !v.is_null());
        if there(&list) { list } else { others.into_iter().find(there).unwrap_or(list) }
    }

    /// Keys that may hold the message list.
    pub(super) fn lists(&self) -> [&str; 3] {
        ["messages", "conversations", "conversation"].map(|name| self.name(name))
    }
}
