//! Plain scalars, and values as numbers, truths, texts and lists.

use serde_json::Value;

/// A plain scalar as the toolkits take it: YAML 1.1's words for true and false, and `1e-5` as a number.
pub(in crate::import) fn scalar(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" | "None" => return Value::Null,
        "true" | "True" | "TRUE" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => return true.into(),
        "false" | "False" | "FALSE" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => return false.into(),
        _ => {}
    }
    let digits = text.replace('_', "");
    let numeric = text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c))
        && text.contains(|c: char| c.is_ascii_digit());
    if numeric && let Ok(whole) = digits.trim_start_matches('+').parse::<i64>() {
        return whole.into();
    }
    let number = digits.parse::<f64>().ok().filter(|_| numeric);
    number.and_then(serde_json::Number::from_f64).map_or_else(|| text.into(), Value::Number)
}

/// A scalar as text.
pub(in crate::import) fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(s) => Some(s.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

/// A number, also one written as a string.
pub(in crate::import) fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(n) => n.as_f64(),
        Value::String(s) => s.trim().parse().ok().filter(|x: &f64| x.is_finite()),
        _ => None,
    }
}

/// True or false, also as a word.
pub(in crate::import) fn truth(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(b) => Some(*b),
        Value::String(s) => scalar(s).as_bool(),
        _ => None,
    }
}

/// A list, from a list or from words between commas.
pub(in crate::import) fn words(value: &Value) -> Vec<String> {
    match value {
        Value::Array(list) => list.iter().filter_map(text).collect(),
        Value::String(s) => s.split(',').map(|w| w.trim().to_string()).filter(|w| !w.is_empty()).collect(),
        other => text(other).into_iter().collect(),
    }
}

/// Whether a value has an unfilled variable or other expansion: `$NAME`, `${NAME}`, `$(command)`.
pub(in crate::import) fn is_expansion(value: &Value) -> bool {
    match value {
        Value::String(s) => s
            .split('$')
            .skip(1)
            .any(|rest| rest.starts_with(|c: char| c.is_ascii_alphabetic() || matches!(c, '_' | '{' | '('))),
        Value::Array(list) => list.iter().any(is_expansion),
        _ => false,
    }
}

/// Whether a value turns the key off.
pub(in crate::import) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(b) => !b,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::String(s) => {
            matches!(s.to_lowercase().as_str(), "" | "none" | "null" | "false" | "no" | "off")
        }
        Value::Array(list) => list.is_empty(),
        Value::Object(table) => table.is_empty(),
    }
}
