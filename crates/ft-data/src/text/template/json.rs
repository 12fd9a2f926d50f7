//! JSON in the exact format of Python's `json.dumps`, as used by chat templates for tool schemas and calls;
//! models are trained on this exact spelling.

use super::bounds::{spend, spend_product, weigh};
use super::python::access::iterate;
use super::python::compare::sort;
use super::python::kind::{Kind, float};
use super::python::text::float_text;
use crate::shape::values::is_reserved;
use minijinja::{Error, ErrorKind, Value};
use std::fmt::Write;

/// Options of `json.dumps`.
pub(super) struct Style {
    /// Escapes U+007F and all characters above.
    pub ensure_ascii: bool,
    /// Indentation per level; `None` writes a single line.
    pub indent: Option<String>,
    /// Separator of items: by default ", ", or "," when indented.
    pub item_separator: String,
    /// Separator of key and value.
    pub key_separator: String,
    /// Sorts keys by code point.
    pub sort_keys: bool,
}

/// Serializes `value` to JSON.
///
/// # Errors
/// Values without a JSON form (undefined, functions), and nesting deeper than 200 levels.
pub(super) fn dumps(value: &Value, style: &Style) -> Result<String, Error> {
    let mut out = String::new();
    // budget: an escape takes up to six bytes per byte
    (0..4).try_for_each(|_| weigh(value))?;
    write(&mut out, value, style, 0)?;
    Ok(out)
}

fn fail(what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {what}"))
}

fn write(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    if depth > 200 {
        return Err(fail("the value is nested deeper than 200 levels"));
    }
    match Kind::of(value) {
        Kind::None => out.push_str("null"),
        Kind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        Kind::Int | Kind::Float => number(out, value),
        Kind::Str => string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        Kind::List | Kind::Tuple => {
            let items = iterate(value)?;
            if items.is_empty() {
                out.push_str("[]");
                return Ok(());
            }
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                gap(out, style, depth + 1, i > 0)?;
                write(out, item, style, depth + 1)?;
            }
            gap(out, style, depth, false)?;
            out.push(']');
        }
        Kind::Dict => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if keys.is_empty() {
                out.push_str("{}");
                return Ok(());
            }
            if style.sort_keys {
                sort(&mut keys, false, |key| key)?;
            }
            out.push('{');
            for (i, key) in keys.iter().enumerate() {
                gap(out, style, depth + 1, i > 0)?;
                match Kind::of(key) {
                    Kind::Str => string(out, key.as_str().unwrap_or_default(), style.ensure_ascii),
                    Kind::Int | Kind::Float | Kind::Bool | Kind::None => {
                        out.push('"');
                        write(out, key, style, depth + 1)?;
                        out.push('"');
                    }
                    other => return Err(fail(format!("a key cannot be a {}", other.name()))),
                }
                spend(style.key_separator.len())?;
                out.push_str(&style.key_separator);
                write(out, &value.get_item(key)?, style, depth + 1)?;
            }
            gap(out, style, depth, false)?;
            out.push('}');
        }
        other => return Err(fail(format!("Object of type {} is not JSON serializable", other.name()))),
    }
    Ok(())
}

/// Writes separator and indentation before an item or a closing bracket.
fn gap(out: &mut String, style: &Style, depth: usize, separator: bool) -> Result<(), Error> {
    if separator {
        spend(style.item_separator.len())?;
        out.push_str(&style.item_separator);
    }
    if let Some(indent) = &style.indent {
        spend_product(indent.len(), depth)?;
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
    Ok(())
}

fn number(out: &mut String, value: &Value) {
    if value.is_integer() {
        let _ = write!(out, "{value}");
    } else {
        let x = float(value).unwrap_or(f64::NAN);
        out.push_str(match () {
            () if x.is_nan() => "NaN",
            () if x.is_infinite() && x > 0.0 => "Infinity",
            () if x.is_infinite() => "-Infinity",
            () => return out.push_str(&float_text(x)),
        });
    }
}

/// Escapes `text` for use between the quotes of a JSON string.
pub(crate) fn escaped(text: &str, ensure_ascii: bool) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    string(&mut out, text, ensure_ascii);
    out[1..out.len() - 1].to_string()
}

fn string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            // marks pass through unescaped, and are removed from the text afterwards
            c if c < ' ' || (ensure_ascii && c > '~' && !is_reserved(c)) => {
                let mut units = [0u16; 2];
                for unit in c.encode_utf16(&mut units) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_escape_as_python_does() {
        let mut a = String::new();
        string(&mut a, "é<\u{1}\"\\\n😀\u{7f}", false);
        assert_eq!(a, "\"é<\\u0001\\\"\\\\\\n😀\u{7f}\"");
        let mut b = String::new();
        string(&mut b, "é😀~\u{7f}", true);
        assert_eq!(b, "\"\\u00e9\\ud83d\\ude00~\\u007f\"");
    }
}
