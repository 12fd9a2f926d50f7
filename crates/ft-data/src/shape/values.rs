//! JSON values of rows, and in error messages; Unicode noncharacters.

use ft_base::store::json;
use serde_json::{Map, Value};
use std::borrow::Cow;

/// Parses JSON of a row as Python does: `-0` is the integer 0. `serde_json` makes a float of it.
pub(crate) fn parsed(text: &[u8]) -> serde_json::Result<Value> {
    json::value(&with_integer_zeros(text))
}

/// Replaces the sign of `-0` by a space, so that places in errors stay.
fn with_integer_zeros(text: &[u8]) -> Cow<'_, [u8]> {
    let mut out = Cow::Borrowed(text);
    if !text.windows(2).any(|pair| pair == b"-0") {
        return out;
    }
    let is_zero = |i: usize| {
        let begins = i.checked_sub(1).is_none_or(|before| b" \t\r\n[,:".contains(&text[before]));
        let ends = text.get(i + 2).is_none_or(|b| !matches!(b, b'0'..=b'9' | b'.' | b'e' | b'E'));
        begins && ends && text.get(i + 1) == Some(&b'0')
    };
    let (mut quoted, mut escaped) = (false, false);
    for (i, b) in text.iter().enumerate() {
        match (quoted, b) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => quoted = !quoted,
            (false, b'-') if is_zero(i) => out.to_mut()[i] = b' ',
            _ => {}
        }
    }
    out
}

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

#[cfg(test)]
mod tests {
    use super::*;

    /// As `json.loads` of Python has them.
    #[test]
    fn a_negative_zero_without_a_fraction_is_an_integer() {
        let text = r#"[-0, -0.0,-0e1, -1, 1e-0, "-0", "\\", -0, {"a":-0, "-0": [-0]}]"#;
        let value = parsed(text.as_bytes()).unwrap().to_string();
        assert_eq!(value, r#"[0,-0.0,-0.0,-1,1.0,"-0","\\",0,{"a":0,"-0":[0]}]"#);
        assert_eq!(parsed(b"-0").unwrap().to_string(), "0");
        for broken in ["-00", "--0", "[-0", "1-0", "-0x"] {
            assert!(parsed(broken.as_bytes()).is_err(), "{broken}");
        }
    }
}
