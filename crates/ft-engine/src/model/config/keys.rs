//! Typed access to the keys of a config.

use super::error::{Error, Result};
use ft_base::store::json::short;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// Typed access to the keys of a config; errors name the file and the key. Null counts as absent.
///
/// Every number is range-checked: products of sizes stay far below 64 bits, and absurd sizes are refused
/// before anything is allocated.
pub struct Keys<'a> {
    file: &'a str,
    /// Path of the table, with a trailing dot.
    path: String,
    pub(super) raw: &'a Map<String, Value>,
    /// Path and keys of a table of the file merged into this one.
    merged: Option<(String, &'a Map<String, Value>)>,
}

impl<'a> Keys<'a> {
    /// Accessor for the top-level object of `file`.
    pub fn new(file: &'a str, raw: &'a Map<String, Value>) -> Self {
        Self { file, path: String::new(), raw, merged: None }
    }

    /// Accessor for a nested table, if present.
    pub fn table(&self, key: &str) -> Result<Option<Keys<'a>>> {
        let of = |raw| Keys { file: self.file, path: format!("{}{key}.", self.path), raw, merged: None };
        Ok(self.typed(key, "an object", Value::as_object)?.map(of))
    }

    /// Accessor for other contents; errors name this file and this table.
    pub(super) fn over<'b>(&self, raw: &'b Map<String, Value>) -> Keys<'b>
    where
        'a: 'b,
    {
        Keys { file: self.file, path: self.path.clone(), raw, merged: None }
    }

    /// The same keys, with the table merged into them: errors name the table with the key.
    pub(super) fn merged(self, table: Option<Keys<'a>>) -> Self {
        Self { merged: table.map(|t| (t.path, t.raw)), ..self }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.raw.get(key).filter(|v| !v.is_null())
    }

    /// Name of a key, with dots for nested tables.
    pub(super) fn name(&self, key: &str) -> String {
        let path = match &self.merged {
            Some((path, raw)) if raw.contains_key(key) || !self.raw.contains_key(key) => path,
            _ => &self.path,
        };
        format!("{path}{key}")
    }

    /// Error for a key with an unusable value.
    pub fn bad(&self, key: &str, why: impl Into<String>) -> Error {
        Error::Key { file: self.file.into(), key: self.name(key), why: why.into() }
    }

    /// A note on a key without effect; an error if it `is_new`.
    pub(super) fn without_effect(&self, key: &str, why: &str, is_new: bool) -> Result<String> {
        let value = self.get(key).map(short).unwrap_or_default();
        self.note(key, format!("{value} has no effect, as in transformers: {why}"), is_new)
    }

    /// A note on a key without effect; an error if it `is_new`.
    pub(super) fn note(&self, key: &str, text: String, is_new: bool) -> Result<String> {
        if is_new { Err(self.bad(key, text)) } else { Ok(format!("{}: {text}", self.name(key))) }
    }

    /// The value of a key, converted by `read`; `None` if absent.
    ///
    /// # Errors
    /// A value of another type; the message names the wanted one, `what`.
    pub(super) fn typed<T>(
        &self,
        key: &str,
        what: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        let wanted = || self.bad(key, format!("{}; {what} is wanted", short(v)));
        read(v).map(Some).ok_or_else(wanted)
    }

    /// A finite number within bounds.
    pub fn number(&self, key: &str, bounds: RangeInclusive<f64>) -> Result<Option<f64>> {
        let what = match self.get(key).and_then(Value::as_f64) {
            Some(_) => format!("a number from {:?} to {:?}", bounds.start(), bounds.end()),
            None => "a number".into(),
        };
        self.typed(key, &what, |v| v.as_f64().filter(|x| bounds.contains(x)))
    }

    /// A required number within bounds.
    pub fn required(&self, key: &str, bounds: RangeInclusive<f64>) -> Result<f64> {
        self.number(key, bounds)?.ok_or_else(|| self.bad(key, "missing"))
    }

    /// An integer from 0 to `most`.
    pub fn count(&self, key: &str, most: usize) -> Result<Option<usize>> {
        self.integer(key, 0..=most)
    }

    /// An integer from 1 to `most`.
    pub fn some(&self, key: &str, most: usize) -> Result<Option<usize>> {
        self.integer(key, 1..=most)
    }

    /// A required integer from 1 to `most`.
    pub fn size(&self, key: &str, most: usize) -> Result<usize> {
        self.some(key, most)?.ok_or_else(|| self.bad(key, "missing"))
    }

    fn integer(&self, key: &str, bounds: RangeInclusive<usize>) -> Result<Option<usize>> {
        let what = format!("a whole number from {} to {}", bounds.start(), bounds.end());
        let read = |v: &Value| v.as_u64().and_then(|x| usize::try_from(x).ok());
        self.typed(key, &what, |v| read(v).filter(|x| bounds.contains(x)))
    }

    /// A boolean.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// A string.
    pub fn string(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a text", Value::as_str)
    }
}
