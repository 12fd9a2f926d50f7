//! `str()` and `repr()` of values, and HTML's entities.

use super::kind::{Kind, Range, View, float};
use crate::shape::values::is_reserved;
use crate::text::template::bounds::{spend, weigh};
use minijinja::{Error, Value};
use std::borrow::Cow;
use std::fmt::Write;

/// `str(v)`.
pub(crate) fn text(v: &Value) -> Result<Cow<'_, str>, Error> {
    if let Some(text) = v.as_str() {
        spend(text.len())?;
        return Ok(Cow::Borrowed(text));
    }
    if v.is_undefined() {
        return Ok(Cow::Borrowed(""));
    }
    repr(v).map(Cow::Owned)
}

/// `repr(v)`.
pub(crate) fn repr(v: &Value) -> Result<String, Error> {
    // quotes and escapes take several bytes for one
    for _ in 0..if v.as_object().is_some() || v.as_str().is_some() { 4 } else { 1 } {
        weigh(v)?;
    }
    let mut out = String::new();
    write(&mut out, v);
    Ok(out)
}

fn write(out: &mut String, v: &Value) {
    match Kind::of(v) {
        Kind::Undefined => out.push_str("Undefined"),
        Kind::None => out.push_str("None"),
        Kind::Bool => out.push_str(if v.is_true() { "True" } else { "False" }),
        Kind::Int => out.push_str(&v.to_string()),
        Kind::Float => out.push_str(&float_text(float(v).unwrap_or(f64::NAN))),
        Kind::Str if v.is_safe() => {
            out.push_str("Markup(");
            quote(out, v.as_str().unwrap_or_default());
            out.push(')');
        }
        Kind::Str => quote(out, v.as_str().unwrap_or_default()),
        Kind::List => sequence(out, v, "[", "]"),
        Kind::Tuple => sequence(out, v, "(", if v.len() == Some(1) { ",)" } else { ")" }),
        Kind::Dict => {
            out.push('{');
            let pairs = v.as_object().and_then(|o| o.try_iter_pairs());
            for (i, (key, value)) in pairs.into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write(out, &key);
                out.push_str(": ");
                write(out, &value);
            }
            out.push('}');
        }
        Kind::View => {
            out.push_str(v.downcast_object_ref::<View>().map_or("", |view| view.name));
            sequence(out, v, "([", "])");
        }
        Kind::Range => {
            if let Some(Range { start, stop, step }) = v.downcast_object_ref() {
                let _ = match step {
                    1 => write!(out, "range({start}, {stop})"),
                    _ => write!(out, "range({start}, {stop}, {step})"),
                };
            }
        }
        // Python writes an address
        Kind::Generator => out.push_str("<generator object>"),
        Kind::Other => {
            let _ = write!(out, "{v}");
        }
    }
}

fn sequence(out: &mut String, v: &Value, open: &str, close: &str) {
    out.push_str(open);
    for (i, item) in v.try_iter().into_iter().flatten().enumerate() {
        out.push_str(if i > 0 { ", " } else { "" });
        write(out, &item);
    }
    out.push_str(close);
}

fn quote(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => escape_code(out, c),
        }
    }
    out.push(quote);
}

/// Writes a character as Python's escape sequence of its code.
pub(super) fn escape_code(out: &mut String, c: char) {
    let code = c as u32;
    let _ = match code {
        0..=0xff => write!(out, "\\x{code:02x}"),
        0x100..=0xffff => write!(out, "\\u{code:04x}"),
        _ => write!(out, "\\U{code:08x}"),
    };
}

/// Whether `repr` writes a character as itself. Marks do, and are removed from the text afterwards.
pub(super) fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    // of a string's escapes, combining characters are excepted behind the first
    let mut text = String::from('a');
    text.push(c);
    is_reserved(c) || text.escape_debug().nth(1) == Some(c)
}

/// `repr` of a float: shortest digits, with an exponent below 1e-4 and from 1e16.
pub(crate) fn float_text(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.into();
    }
    let scientific = format!("{x:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let power: i32 = exponent.parse().unwrap_or(0);
    if x != 0.0 && !(-4..16).contains(&power) {
        return format!("{mantissa}e{power:+03}");
    }
    let plain = format!("{x}");
    if plain.contains('.') { plain } else { plain + ".0" }
}

/// The text of a value with HTML's entities; text marked as safe stays as it is.
pub(crate) fn escaped(v: &Value) -> Result<String, Error> {
    let text = text(v)?;
    if v.is_safe() {
        return Ok(text.into_owned());
    }
    spend(5 * text.len())?;
    Ok(entities(&text))
}

/// Replaces the five characters with a meaning in HTML.
pub(crate) fn entities(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::float_text;

    #[test]
    fn floats_are_spelled_as_python_does() {
        for (x, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e16, "1e+16"),
            (123456789012345.0, "123456789012345.0"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e300, "1.5e+300"),
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float_text(x), text);
        }
    }
}
