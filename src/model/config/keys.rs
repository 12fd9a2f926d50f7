//! Typed access to a config's keys.

use crate::model::{Error, Result};
use serde_json::{Map, Value};

/// Typed access to the keys of a config, with errors that name file and key. Null counts as absent.
pub struct Keys<'a> {
    file: &'a str,
    pub(super) raw: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    /// Keys of an object in `file`.
    pub fn new(file: &'a str, raw: &'a Map<String, Value>) -> Self {
        Self { file, raw }
    }

    /// A table below this one.
    pub fn table(&self, key: &str) -> Result<Option<Keys<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(m)) => Ok(Some(Keys { file: self.file, raw: m })),
            Some(v) => Err(self.bad(key, format!("{v}; an object is wanted"))),
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.raw.get(key).filter(|v| !v.is_null())
    }

    /// The error for a key with a value that cannot be used.
    pub fn bad(&self, key: &str, why: impl Into<String>) -> Error {
        Error::Key { file: self.file.into(), key: key.into(), why: why.into() }
    }

    /// A number.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => match v.as_f64().filter(|x| x.is_finite()) {
                Some(x) => Ok(Some(x)),
                None => Err(self.bad(key, format!("{v}; a number is wanted"))),
            },
        }
    }

    /// A whole number that is not negative.
    pub fn count(&self, key: &str) -> Result<Option<usize>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => match v.as_u64().filter(|x| *x <= u64::from(u32::MAX)) {
                Some(x) => Ok(Some(x as usize)),
                None => Err(self.bad(key, format!("{v}; a whole number is wanted"))),
            },
        }
    }

    /// A required whole number above zero.
    pub fn size(&self, key: &str) -> Result<usize> {
        match self.count(key)? {
            Some(0) => Err(self.bad(key, "0")),
            Some(n) => Ok(n),
            None => Err(self.bad(key, "missing")),
        }
    }

    /// true or false.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(v) => Err(self.bad(key, format!("{v}; true or false is wanted"))),
        }
    }

    /// A text.
    pub fn string(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(v) => Err(self.bad(key, format!("{v}; a text is wanted"))),
        }
    }
}
