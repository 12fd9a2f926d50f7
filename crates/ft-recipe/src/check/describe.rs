//! Descriptions of accepted and found values, for messages.

use crate::keys::{INDEX, Interval, Kind, OneDevice, Recompute};
use crate::syntax::{Value, quote};

/// Describes the values accepted by `kind`.
pub(crate) fn expected(kind: Kind) -> String {
    let list = |words: &[(&str, &str)]| words.iter().map(|(w, _)| quote(w)).collect::<Vec<_>>().join(", ");
    match kind {
        Kind::Int(from, to) if from == to => format!("{from}"),
        Kind::Int(from, to) => format!("a whole number from {from} to {to}"),
        Kind::IntOrAuto(from, to) => format!("a whole number from {from} to {to}, or \"auto\""),
        Kind::Every(from, to) => format!("a number of steps from {from} to {to}, {}", Interval::SPELT),
        Kind::Number(bound) => bound.words().to_string(),
        Kind::Bool => "true or false".into(),
        Kind::Text => "a string that is not empty".into(),
        Kind::Name => "a string that can name a folder (no slash, not \"..\")".into(),
        Kind::Word(words) => format!("one of {}", list(words)),
        Kind::Words(words) => format!("a list of {}", list(words)),
        Kind::Anything | Kind::Table(_) => "a table".into(),
        Kind::Strings => "a table of strings".into(),
        Kind::Texts | Kind::Modules => "a list of strings".into(),
        Kind::Tokens => "a list of strings and numbers".into(),
        Kind::Layers => "\"all\", a range such as \"0-5\", or a list of numbers".into(),
        Kind::Experts => "\"all\", a range such as \"0-3\", or a list of numbers".into(),
        Kind::Counts => "a list of whole numbers from 1".into(),
        Kind::Betas => "two numbers from 0 to below 1".into(),
        Kind::Bytes => "a size such as \"48GiB\"".into(),
        Kind::Recompute => {
            let words = Recompute::WORDS.map(|(word, _)| quote(word)).join(", ");
            format!("{words}, or a number of layers from 0 to {INDEX}")
        }
        Kind::Devices => format!("a list of {}", OneDevice::SPELT),
        Kind::Tables(_) => "a list of tables".into(),
    }
}

/// Describes a value found, abbreviated to 60 characters.
pub(crate) fn found(value: &Value) -> String {
    let text = value.to_string();
    let text = if text.chars().count() > 60 {
        format!("{}...", text.chars().take(60).collect::<String>())
    } else {
        text
    };
    match value {
        Value::Int(i128::MIN | i128::MAX) => "a number of more than 38 digits".into(),
        Value::Text(s) if s.trim().is_empty() => "an empty string".into(),
        Value::Text(s) if s.contains('\0') => "a string with a NUL character".into(),
        Value::Text(_) => format!("the string {text}"),
        Value::Int(_) | Value::Float(_) | Value::Bool(_) => text,
        Value::Date(_) => format!("the date {text}"),
        Value::List(_) => format!("the list {text}"),
        Value::Table(_) => "a table".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_string_that_no_key_takes_is_described_by_its_reason() {
        let said = ["a", " ", "a\0"].map(|s| found(&Value::Text(s.into())));
        assert_eq!(said, ["the string \"a\"", "an empty string", "a string with a NUL character"]);
    }
}
