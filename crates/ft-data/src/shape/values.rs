//! JSON values in error messages; Unicode noncharacters.

use serde_json::{Map, Value};

/// Beginning of the message about a missing field.
pub(crate) const MISSING: &str = "no field";

/// Error message for a missing key.
pub(crate) fn missing(name: &str, row: &Map<String, Value>) -> String {
    if row.is_empty() {
        return format!("{MISSING} {name:?}; the object is empty");
    }
    let mut there: Vec<String> = row.keys().take(8).map(|k| brief(&Value::from(k.as_str()))).collect();
    if row.len() > there.len() {
        there.push("...".into());
    }
    format!("{MISSING} {name:?}; there is {}", there.join(", "))
}

/// The type of a value, with an article.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A value for an error message: at most 40 characters, control characters escaped.
pub(crate) fn brief(value: &Value) -> String {
    let text = match value {
        Value::String(s) => s.clone(),
        Value::Array(_) | Value::Object(_) => kind(value).to_string(),
        other => other.to_string(),
    };
    let short: String = text.chars().take(40).flat_map(char::escape_debug).collect();
    if text.chars().nth(40).is_some() { short + "..." } else { short }
}

/// Whether `c` is a noncharacter reserved for marks in a rendering: refused in rows. Noncharacters have no use in text
/// and no tokens.
pub(crate) fn is_reserved(c: char) -> bool {
    ('\u{FDD0}'..='\u{FDEF}').contains(&c)
}
