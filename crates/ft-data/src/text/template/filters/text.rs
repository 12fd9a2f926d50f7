//! Filters of texts and numbers.

use super::{Arguments, Named};
use crate::text::template::bounds::{spend, spend_product};
use crate::text::template::json::{Style, dumps};
use crate::text::template::python::access::{attribute, iterate, length};
use crate::text::template::python::kind::{Kind, float, from_int, integer, invalid, text_value};
use crate::text::template::python::number::{Number, add, too_large};
use crate::text::template::python::strings::{self, capitalized, is_space, lines, split_space};
use crate::text::template::python::text::{entities, escaped, text};
use crate::text::template::python::{methods, percent};
use minijinja::{Error, Value};

const SEPARATORS: &str = "tojson: separators are two texts";

/// Names, parameters, and the function of each filter.
pub(super) const FILTERS: &[(&[&str], &[&str], Named)] = &[
    (&["safe"], &[], |v, _| Ok(Value::from_safe_string(text(v)?.into_owned()))),
    (&["escape", "e"], &[], |v, _| escaped(v).map(Value::from_safe_string)),
    (&["forceescape"], &[], |v, _| Ok(Value::from_safe_string(entities(&text(v)?)))),
    (&["string"], &[], |v, _| soft(v)),
    (&["upper"], &[], |v, _| on_text(v, "upper", &[])),
    (&["lower"], &[], |v, _| on_text(v, "lower", &[])),
    (&["capitalize"], &[], |v, _| changed(v, capitalized)),
    (&["title"], &[], |v, _| Ok(Value::from(title(&text(v)?)))),
    (&["trim"], &["chars"], |v, a| on_text(v, "strip", a.some(0).cloned().as_slice())),
    (&["center"], &["width"], |v, a| on_text(v, "center", &[from_int(a.int(0, 80)?)])),
    (&["replace"], &["old", "new", "count"], replace),
    (&["indent"], &["width", "first", "blank"], indent),
    (&["truncate"], &["length", "killwords", "end", "leeway"], truncate),
    (&["wordcount"], &[], |v, _| Ok(Value::from(words(&text(v)?)))),
    (&["striptags"], &[], |v, _| striptags(&text(v)?).map(Value::from)),
    (&["urlencode"], &[], urlencode),
    (&["filesizeformat"], &["binary"], file_size),
    (&["xmlattr"], &["autospace"], xml_attributes),
    (&["int"], &["default", "base"], int),
    (&["float"], &["default"], |v, a| {
        Ok(to_float(v)?.map_or_else(|| a.get(0).cloned().unwrap_or(Value::from(0.0)), Value::from))
    }),
    (&["abs"], &[], |v, _| match Number::of(v) {
        Some(Number::Int(n)) => {
            Ok(from_int(n.checked_abs().ok_or_else(|| invalid("an integer is too large"))?))
        }
        Some(Number::Float(x)) => Ok(Value::from(x.abs())),
        None => Err(invalid(format!("bad operand type for abs(): '{}'", Kind::of(v).name()))),
    }),
    (&["round"], &["precision", "method"], round),
    (&["default", "d"], &["default_value", "boolean"], |v, a| {
        let missing = v.is_undefined() || a.is_true(1) && !v.is_true();
        Ok(if missing { a.get(0).cloned().unwrap_or(Value::from("")) } else { v.clone() })
    }),
    (&["attr"], &["name"], |v, a| {
        let name = a.needed(0)?.as_str().unwrap_or_default();
        let there = matches!(Kind::of(v), Kind::Other | Kind::Undefined)
            || methods::known(Kind::of(v), name).is_some();
        if there { attribute(v, name) } else { Ok(Value::UNDEFINED) }
    }),
    (&["length", "count"], &[], |v, _| length(v).map(Value::from)),
    // as transformers defines it, unlike Jinja2
    (&["tojson"], &["ensure_ascii", "indent", "separators", "sort_keys"], to_json),
];

/// The value as text, still marked safe if it was.
fn soft(v: &Value) -> Result<Value, Error> {
    match v.as_str() {
        Some(_) => Ok(v.clone()),
        None => Ok(Value::from(text(v)?.into_owned())),
    }
}

fn changed(v: &Value, f: fn(&str) -> String) -> Result<Value, Error> {
    Ok(text_value(f(&text(v)?), v.is_safe()))
}

/// Calls a method of strings on the value's text.
fn on_text(v: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    strings::call(&soft(v)?, name, args)
}

/// `title` of Jinja2: words begin after spaces, hyphens and opening brackets.
fn title(text: &str) -> String {
    let (mut out, mut inside) = (String::new(), false);
    for c in text.chars() {
        if c == '-' || is_space(c) || matches!(c, '(' | '{' | '[' | '<') {
            out.push(c);
            inside = false;
        } else if inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
            inside = true;
        }
    }
    out
}

fn replace(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let (from, to) = (text(a.needed(0)?)?, text(a.needed(1)?)?);
    let count = if a.some(2).is_none() { -1 } else { a.int(2, -1)? };
    let plain = Value::from(text(v)?.into_owned());
    let args = [Value::from(from.into_owned()), Value::from(to.into_owned()), from_int(count)];
    strings::call(&plain, "replace", &args)
}

fn indent(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let whole = v.as_str().ok_or_else(|| invalid(format!("indent of a {}", Kind::of(v).name())))?;
    let safe = v.is_safe();
    let by = match a.get(0).and_then(Value::as_str) {
        Some(by) => by.to_string(),
        None => {
            let n = usize::try_from(a.int(0, 4)?.max(0)).unwrap_or(usize::MAX);
            spend(n)?;
            " ".repeat(n)
        }
    };
    let whole = format!("{whole}\n");
    let all = lines(&whole, false);
    spend_product(all.len(), by.len() + 1)?;
    let mut out = if a.is_true(1) { by.clone() } else { String::new() };
    for (i, line) in all.into_iter().enumerate() {
        if i > 0 {
            out.push('\n');
            out.push_str(if a.is_true(2) || !line.is_empty() { &by } else { "" });
        }
        out.push_str(line);
    }
    Ok(text_value(out, safe))
}

fn truncate(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let end = match a.get(2) {
        None => "...",
        Some(v) => v.as_str().ok_or_else(|| invalid("truncate: end is no text"))?,
    };
    let leeway = if a.some(3).is_none() { 5 } else { a.int(3, 5)? };
    let keep = a.int(0, 255)? - end.chars().count() as i128;
    if keep < 0 || leeway < 0 {
        return Err(invalid("truncate: the length is below that of its end, or the leeway negative"));
    }
    if (length(v)? as i128) <= a.int(0, 255)? + leeway {
        return Ok(v.clone());
    }
    let whole = v.as_str().ok_or_else(|| invalid(format!("truncate of a {}", Kind::of(v).name())))?;
    spend_product(whole.len(), 4)?;
    let cut: String = whole.chars().take(keep as usize).collect();
    let kept =
        if a.is_true(1) { cut.as_str() } else { cut.rsplit_once(' ').map_or(cut.as_str(), |(k, _)| k) };
    add(&text_value(kept.to_string(), v.is_safe()), &Value::from(end))
}

/// The number of runs of letters, digits and underscores.
fn words(text: &str) -> usize {
    let inside = |c: char| c.is_alphanumeric() || c == '_';
    text.split(|c| !inside(c)).filter(|w| !w.is_empty()).count()
}

/// Removes tags and comments, and collapses white space.
fn striptags(text: &str) -> Result<String, Error> {
    spend_product(text.len(), 2)?;
    let (mut out, mut rest) = (String::new(), text);
    while let Some(start) = rest.find('<') {
        let tail = &rest[start..];
        let end = match tail.strip_prefix("<!--") {
            Some(inside) => inside.find("-->").map(|e| e + 7),
            None => tail.find('>').map(|e| e + 1),
        };
        let Some(end) = end else { break };
        out.push_str(&rest[..start]);
        rest = &tail[end..];
    }
    out.push_str(rest);
    let out = split_space(&out, usize::MAX, false).join(" ");
    let known = [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&#34;", "\""),
        ("&#39;", "'"),
        ("&nbsp;", "\u{a0}"),
        ("&amp;", "&"),
    ];
    Ok(known.iter().fold(out, |text, (entity, c)| text.replace(entity, c)))
}

/// Percent-encodes what is not a letter, a digit, or one of `_.-~`; in paths, `/` stays.
fn quoted(v: &Value, in_query: bool) -> Result<String, Error> {
    let text = text(v)?;
    spend_product(text.len(), 3)?;
    let mut out = String::new();
    for b in text.bytes() {
        match b {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => out.push(b as char),
            b'/' if !in_query => out.push('/'),
            b' ' if in_query => out.push('+'),
            b => out.push_str(&format!("%{b:02X}")),
        }
    }
    Ok(out)
}

fn urlencode(v: &Value, _: &Arguments) -> Result<Value, Error> {
    let pairs: Vec<Value> = match Kind::of(v) {
        Kind::Str | Kind::None | Kind::Bool | Kind::Int | Kind::Float | Kind::Other => {
            return quoted(v, false).map(Value::from);
        }
        Kind::Dict => methods::pairs(v)?.into_iter().map(|(k, v)| Value::from(vec![k, v])).collect(),
        _ => iterate(v)?,
    };
    let mut out = Vec::new();
    for pair in pairs {
        match iterate(&pair)?.as_slice() {
            [k, v] => out.push(quoted(k, true)? + "=" + &quoted(v, true)?),
            _ => return Err(invalid("urlencode wants pairs")),
        }
    }
    Ok(Value::from(out.join("&")))
}

fn file_size(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let bytes = to_float(v)?.ok_or_else(|| invalid("filesizeformat of what is no number"))?;
    let (base, end) = if a.is_true(0) { (1024f64, "iB") } else { (1000f64, "B") };
    if bytes == 1.0 {
        return Ok(Value::from("1 Byte"));
    }
    if bytes < base {
        return Ok(Value::from(format!("{} Bytes", bytes.trunc() as i128)));
    }
    let mut unit = base;
    for (i, prefix) in ["k", "M", "G", "T", "P", "E", "Z", "Y"].into_iter().enumerate() {
        unit *= base;
        if bytes < unit || i == 7 {
            let prefix = if a.is_true(0) { prefix.to_uppercase() } else { prefix.to_string() };
            return Ok(Value::from(format!("{:.1} {prefix}{end}", base * bytes / unit)));
        }
    }
    Ok(Value::UNDEFINED)
}

fn xml_attributes(v: &Value, a: &Arguments) -> Result<Value, Error> {
    if Kind::of(v) != Kind::Dict {
        return Err(invalid("xmlattr wants a dict"));
    }
    let mut out = Vec::new();
    for (key, value) in methods::pairs(v)? {
        if value.is_none() || value.is_undefined() {
            continue;
        }
        let name = key.as_str().ok_or_else(|| invalid("xmlattr wants names of attributes"))?;
        if name.contains([' ', '\t', '\n', '\r', '\x0b', '\x0c', '/', '>', '=']) {
            return Err(invalid(format!("Invalid character in attribute name: {name:?}")));
        }
        out.push(format!("{}=\"{}\"", escaped(&key)?, escaped(&value)?));
    }
    let space = if out.is_empty() || a.get(0).is_some_and(|v| !v.is_true()) { "" } else { " " };
    Ok(Value::from(space.to_string() + &out.join(" ")))
}

/// `int(text, base)`, with `_` between digits and the prefix of the base.
fn parsed_int(text: &str, base: u32) -> Option<i128> {
    let text = text.trim_matches(is_space);
    let (sign, digits) = match text.strip_prefix(['-', '+']) {
        Some(digits) => (&text[..1], digits),
        None => ("", text),
    };
    let prefixed = [(2, "0b"), (8, "0o"), (16, "0x")].into_iter().find_map(|(b, prefix)| {
        let rest = digits.get(..2).filter(|p| p.eq_ignore_ascii_case(prefix)).map(|_| &digits[2..])?;
        (base == b || base == 0).then_some((b, rest.strip_prefix('_').unwrap_or(rest)))
    });
    let zeros = base == 0 && digits.starts_with('0') && digits.contains(|c| !matches!(c, '0' | '_'));
    let (base, digits) = match prefixed {
        Some(found) => found,
        None if zeros => return None,
        None => (if base == 0 { 10 } else { base }, digits),
    };
    let apart = digits.starts_with('_') || digits.ends_with('_') || digits.contains("__");
    if apart || digits.starts_with(['-', '+']) || !(2..=36).contains(&base) {
        return None;
    }
    i128::from_str_radix(&format!("{sign}{}", digits.replace('_', "")), base).ok()
}

/// `float(v)`; `None` where Python raises a `ValueError` or `TypeError`.
fn to_float(v: &Value) -> Result<Option<f64>, Error> {
    if v.is_undefined() {
        return Err(Error::from(minijinja::ErrorKind::UndefinedError));
    }
    if let Some(number) = Number::of(v) {
        return Ok(Some(number.float()));
    }
    let Some(text) = v.as_str() else { return Ok(None) };
    spend(text.len())?;
    let text = text.trim_matches(is_space);
    let bytes = text.as_bytes();
    let digit = |i: usize| bytes.get(i).is_some_and(u8::is_ascii_digit);
    let apart = text.match_indices('_').any(|(i, _)| i == 0 || !digit(i - 1) || !digit(i + 1));
    Ok(if apart { None } else { text.replace('_', "").parse().ok() })
}

fn int(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let default = || a.get(0).cloned().unwrap_or(Value::from(0));
    let truncated = |x: f64| (x.is_finite() && x.abs() < 1e38).then(|| from_int(x.trunc() as i128));
    if let Some(x) = float(v) {
        // int(inf) raises an OverflowError, int(nan) a ValueError
        return match truncated(x) {
            Some(n) => Ok(n),
            None if x.is_nan() => Ok(default()),
            None => Err(invalid("cannot convert float infinity to integer")),
        };
    }
    if let Some(n) = integer(v) {
        return Ok(from_int(n));
    }
    let base = u32::try_from(a.int(1, 10)?).unwrap_or(99);
    let parsed = v.as_str().and_then(|text| parsed_int(text, base));
    if let Some(n) = parsed {
        return Ok(from_int(n));
    }
    Ok(to_float(v)?.and_then(truncated).unwrap_or_else(default))
}

fn round(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let number = Number::of(v)
        .ok_or_else(|| invalid(format!("type {} doesn't define __round__", Kind::of(v).name())))?;
    let precision = a.int(0, 0)?;
    let method = a.get(1).map_or(Some("common"), Value::as_str).unwrap_or_default();
    let factor = 10f64.powi(i32::try_from(precision).unwrap_or(i32::MAX));
    match (method, number) {
        ("common", Number::Int(n)) if precision >= 0 => Ok(from_int(n)),
        ("common", Number::Int(n)) => {
            let unit = 10i128.checked_pow(u32::try_from(-precision).unwrap_or(u32::MAX));
            unit.map_or(Some(0), |unit| half_even(n, unit)).map(from_int).ok_or_else(too_large)
        }
        ("common", Number::Float(x)) if !x.is_finite() || precision > 308 => Ok(Value::from(x)),
        ("common", Number::Float(x)) if precision >= 0 => {
            Ok(Value::from(format!("{x:.*}", precision as usize).parse().unwrap_or(x)))
        }
        ("common", Number::Float(x)) => {
            let unit = 10f64.powi(i32::try_from(precision.unsigned_abs()).unwrap_or(i32::MAX));
            Ok(Value::from(if unit.is_finite() { (x / unit).round_ties_even() * unit } else { 0.0 }))
        }
        ("ceil" | "floor", number) => {
            let scaled = number.float() * factor;
            if !scaled.is_finite() {
                return Err(invalid("cannot round an infinite number"));
            }
            // Python's floor is an integer, without a negative zero
            Ok(Value::from((if method == "ceil" { scaled.ceil() } else { scaled.floor() } + 0.0) / factor))
        }
        _ => Err(invalid("method must be common, ceil or floor")),
    }
}

/// `n` rounded to a multiple of `unit`, a half to the even one; `None` for a number that is too large.
fn half_even(n: i128, unit: i128) -> Option<i128> {
    let (q, r) = (n.div_euclid(unit), n.rem_euclid(unit));
    let up = r > unit - r || r == unit - r && q % 2 != 0;
    (q + i128::from(up)).checked_mul(unit)
}

/// `json.dumps` of Python.
fn to_json(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let indent = match a.some(1).map(|i| (i.as_str(), integer(i))) {
        None => None,
        Some((Some(text), _)) => Some(text.to_string()),
        Some((None, Some(n))) => Some(" ".repeat(usize::try_from(n).unwrap_or(0).min(64))),
        Some(_) => return Err(invalid("tojson: indent is a number or a text")),
    };
    let separators = a.some(2).map(iterate).transpose()?;
    let (item_separator, key_separator) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }, ": "),
        Some([item, key]) => item.as_str().zip(key.as_str()).ok_or_else(|| invalid(SEPARATORS))?,
        Some(_) => return Err(invalid(SEPARATORS)),
    };
    let style = Style {
        ensure_ascii: a.is_true(0),
        indent,
        item_separator: item_separator.into(),
        key_separator: key_separator.into(),
        sort_keys: a.is_true(3),
    };
    dumps(v, &style).map(Value::from)
}

/// `format` of Jinja2: `value % args`.
pub(super) fn format(v: &Value, args: &[Value]) -> Result<Value, Error> {
    let template = soft(v)?;
    let given = match args.split_last() {
        Some((last, [])) if last.is_kwargs() => Value::from_pairs(methods::pairs(last)?),
        Some((last, _)) if last.is_kwargs() => {
            return Err(invalid("can't handle positional and keyword arguments at the same time"));
        }
        _ => crate::text::template::python::kind::tuple(args.to_vec()),
    };
    let out = percent::percent(template.as_str().unwrap_or_default(), template.is_safe(), &given)?;
    Ok(text_value(out, template.is_safe()))
}
