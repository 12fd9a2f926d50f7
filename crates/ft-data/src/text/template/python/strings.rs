//! Methods of strings.

use super::access::iterate;
use super::digits::{Align, aligned, check_width};
use super::format::formatted;
use super::kind::{Kind, integer, invalid, text_value, tuple};
use super::methods::{bind, pairs, positional};
use super::text::{entities, escaped};
use crate::text::template::bounds::{spend, spend_product};
use minijinja::{Error, Value};
use std::sync::LazyLock;

/// Methods of strings; `encode`, `maketrans` and `translate` need bytes and tables, and are not built yet.
pub(super) static METHODS: LazyLock<Vec<&str>> = LazyLock::new(|| {
    "capitalize casefold center count encode endswith expandtabs find format \
     format_map index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable \
     isspace istitle isupper join ljust lower lstrip maketrans partition removeprefix removesuffix replace \
     rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title translate \
     upper zfill"
        .split_whitespace()
        .collect()
});

/// Whether Python takes a character as white space.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Whether a character ends a line.
fn is_break(c: char) -> bool {
    matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// `str.splitlines`.
pub(crate) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let mut out = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(is_break) {
        let tail = &rest[at..];
        let end = if tail.starts_with("\r\n") { 2 } else { tail.chars().next().map_or(1, char::len_utf8) };
        out.push(if keep_ends { &rest[..at + end] } else { &rest[..at] });
        rest = &rest[at + end..];
    }
    if !rest.is_empty() {
        out.push(rest);
    }
    out
}

/// `str.capitalize`.
pub(crate) fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    let Some(first) = chars.next() else { return String::new() };
    titled(first) + &chars.as_str().to_lowercase()
}

/// The title case of a character; a character of several letters keeps only the first large.
fn titled(c: char) -> String {
    // letters of two signs with a form of their own
    for pair in ["Ǆǅǆ", "Ǉǈǉ", "Ǌǋǌ", "Ǳǲǳ"] {
        if pair.contains(c) {
            return pair.chars().nth(1).into_iter().collect();
        }
    }
    let mut upper = c.to_uppercase();
    match upper.next() {
        Some(first) if c.is_alphabetic() && upper.len() > 0 && c != 'ŉ' => {
            first.to_string() + &upper.collect::<String>().to_lowercase()
        }
        _ => c.to_uppercase().collect(),
    }
}

struct Call<'a> {
    name: &'a str,
    text: &'a str,
    safe: bool,
    args: &'a [Value],
}

/// Calls a method of a string.
pub(crate) fn call(object: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let text = object.as_str().unwrap_or_default();
    spend(text.len())?;
    let call = Call { name, text, safe: object.is_safe(), args };
    match name {
        "split" | "rsplit" | "splitlines" | "partition" | "rpartition" | "join" => call.pieces(),
        "find" | "rfind" | "index" | "rindex" | "count" | "startswith" | "endswith" => call.search(),
        "format" | "format_map" => call.format(),
        "encode" | "maketrans" | "translate" => Err(invalid(format!("str.{name} is not built yet"))),
        _ if name.starts_with("is") => call.asks(),
        _ => call.changed().map(|out| text_value(out, object.is_safe())),
    }
}

impl Call<'_> {
    fn args(&self, least: usize, most: usize) -> Result<&[Value], Error> {
        positional(self.name, self.args, least, most)
    }

    fn string<'v>(&self, v: &'v Value) -> Result<&'v str, Error> {
        v.as_str().ok_or_else(|| {
            invalid(format!("{}() argument must be str, not {}", self.name, Kind::of(v).name()))
        })
    }

    fn int(&self, v: &Value) -> Result<i128, Error> {
        integer(v).ok_or_else(|| {
            invalid(format!(
                "{}(): '{}' object cannot be interpreted as an integer",
                self.name,
                Kind::of(v).name()
            ))
        })
    }

    fn value(&self, text: &str) -> Value {
        text_value(text.to_string(), self.safe)
    }

    /// Methods with a string as the result.
    fn changed(&self) -> Result<String, Error> {
        let text = self.text;
        Ok(match self.name {
            "strip" | "lstrip" | "rstrip" => self.stripped()?,
            "removeprefix" => {
                let prefix = self.string(&self.args(1, 1)?[0])?;
                text.strip_prefix(prefix).unwrap_or(text).to_string()
            }
            "removesuffix" => {
                let suffix = self.string(&self.args(1, 1)?[0])?;
                text.strip_suffix(suffix).unwrap_or(text).to_string()
            }
            "replace" => self.replaced()?,
            "center" | "ljust" | "rjust" | "zfill" => self.filled()?,
            "expandtabs" => self.without_tabs()?,
            name => {
                self.args(0, 0)?;
                match name {
                    "upper" => text.to_uppercase(),
                    "lower" => text.to_lowercase(),
                    "casefold" => text.to_lowercase().replace('ß', "ss").replace('ς', "σ"),
                    "capitalize" => capitalized(text),
                    "swapcase" => swapped(text),
                    _ => title(text),
                }
            }
        })
    }

    fn stripped(&self) -> Result<String, Error> {
        let set = self.args(0, 1)?.first().filter(|v| !v.is_none()).map(|v| self.string(v)).transpose()?;
        spend_product(self.text.len(), set.map_or(0, |s| s.len() / 4))?;
        let inside = |c: char| set.map_or(is_space(c), |set| set.contains(c));
        Ok(match self.name {
            "strip" => self.text.trim_matches(inside),
            "lstrip" => self.text.trim_start_matches(inside),
            _ => self.text.trim_end_matches(inside),
        }
        .to_string())
    }

    fn replaced(&self) -> Result<String, Error> {
        let args = self.args(2, 3)?;
        let (from, to) = (self.string(&args[0])?, self.string(&args[1])?);
        let to = if self.safe { escaped(&args[1])? } else { to.to_string() };
        replace(self.text, from, &to, args.get(2).map_or(Ok(-1), |n| self.int(n))?)
    }

    fn filled(&self) -> Result<String, Error> {
        let args = self.args(1, if self.name == "zfill" { 1 } else { 2 })?;
        let width = self.int(&args[0])?.max(0);
        let width = usize::try_from(width).unwrap_or(usize::MAX);
        let length = self.text.chars().count();
        let width = if width <= length { 0 } else { check_width(width)? };
        let fill = args.get(1).map_or(Ok(" "), |v| self.string(v))?;
        let mut one = fill.chars();
        let (Some(fill), None) = (one.next(), one.next()) else {
            return Err(invalid("The fill character must be exactly one character long"));
        };
        if self.safe && entities(&fill.to_string()).len() > fill.len_utf8() {
            return Err(invalid("The fill character must be exactly one character long"));
        }
        match self.name {
            "ljust" => aligned("", self.text, fill, Align::Left, width),
            "rjust" => aligned("", self.text, fill, Align::Right, width),
            "center" => {
                let missing = width.saturating_sub(length);
                let left = missing / 2 + (missing & width & 1);
                let right = fill.to_string().repeat(missing - left);
                Ok(fill.to_string().repeat(left) + self.text + &right)
            }
            _ => {
                let sign = if self.text.starts_with(['+', '-']) { 1 } else { 0 };
                aligned(&self.text[..sign], &self.text[sign..], '0', Align::Inside, width)
            }
        }
    }

    fn without_tabs(&self) -> Result<String, Error> {
        let size = bind(self.name, &["tabsize"], self.args)?.pop().flatten();
        let size = usize::try_from(size.map_or(Ok(8), |v| self.int(&v))?.max(0)).unwrap_or(usize::MAX);
        let size = check_width(size)?;
        let (mut out, mut column) = (String::new(), 0);
        for c in self.text.chars() {
            match c {
                '\t' => {
                    let n = if size == 0 { 0 } else { size - column % size };
                    spend(n)?;
                    out.extend(std::iter::repeat_n(' ', n));
                    column += n;
                }
                c => {
                    out.push(c);
                    column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
                }
            }
        }
        Ok(out)
    }

    /// Methods that split or join.
    fn pieces(&self) -> Result<Value, Error> {
        match self.name {
            "join" => {
                let items = iterate(&self.args(1, 1)?[0])?;
                let mut out = String::new();
                for (i, item) in items.iter().enumerate() {
                    let piece = if self.safe { escaped(item)? } else { self.string(item)?.to_string() };
                    spend(piece.len() + self.text.len())?;
                    out.push_str(if i > 0 { self.text } else { "" });
                    out.push_str(&piece);
                }
                Ok(text_value(out, self.safe))
            }
            "splitlines" => {
                let keep = bind(self.name, &["keepends"], self.args)?.pop().flatten();
                spend_product(self.text.len(), 8)?;
                let all = lines(self.text, keep.is_some_and(|k| k.is_true()));
                Ok(all.into_iter().map(|l| self.value(l)).collect::<Vec<_>>().into())
            }
            "partition" | "rpartition" => {
                let by = self.string(&self.args(1, 1)?[0])?;
                if by.is_empty() {
                    return Err(invalid("empty separator"));
                }
                let found = if self.name == "partition" {
                    self.text.split_once(by)
                } else {
                    self.text.rsplit_once(by)
                };
                let parts = match (found, self.name) {
                    (Some((a, b)), _) => [a, by, b],
                    (None, "partition") => [self.text, "", ""],
                    _ => ["", "", self.text],
                };
                Ok(tuple(parts.into_iter().map(|p| self.value(p)).collect()))
            }
            _ => self.split(),
        }
    }

    fn split(&self) -> Result<Value, Error> {
        let mut args = bind(self.name, &["sep", "maxsplit"], self.args)?;
        let (most, by) = (args.pop().flatten(), args.pop().flatten());
        let by = by.filter(|v| !v.is_none());
        let by = by.as_ref().map(|v| self.string(v)).transpose()?;
        let most = usize::try_from(most.map_or(Ok(-1), |v| self.int(&v))?).unwrap_or(usize::MAX);
        let from_end = self.name == "rsplit";
        let count = match by {
            Some("") => return Err(invalid("empty separator")),
            Some(by) => self.text.matches(by).count(),
            None => self.text.chars().filter(|c| is_space(*c)).count(),
        };
        spend_product(count.min(most).saturating_add(1), 64)?;
        let parts: Vec<&str> = match (by, from_end) {
            (Some(by), false) => self.text.splitn(most.saturating_add(1), by).collect(),
            (Some(by), true) => {
                let mut parts: Vec<&str> = self.text.rsplitn(most.saturating_add(1), by).collect();
                parts.reverse();
                parts
            }
            (None, _) => split_space(self.text, most, from_end),
        };
        Ok(parts.into_iter().map(|p| self.value(p)).collect::<Vec<_>>().into())
    }

    /// Methods that search, with optional bounds in characters.
    fn search(&self) -> Result<Value, Error> {
        let args = self.args(1, 3)?;
        let chars = self.text.chars().count() as i128;
        let offset = |i: usize, default: i128| {
            let n = match args.get(i).filter(|v| !v.is_none()) {
                None => default,
                Some(v) => self.int(v)?,
            };
            Ok::<_, Error>(if n < 0 { (n + chars).max(0) } else { n })
        };
        let (start, stop) = (offset(1, 0)?, offset(2, chars)?.min(chars));
        let part = |v: &Value| self.string(v).map(str::to_string);
        let byte = |n: i128| self.text.char_indices().nth(n as usize).map_or(self.text.len(), |(i, _)| i);
        let inside = (start <= stop).then(|| &self.text[byte(start)..byte(stop)]);
        if matches!(self.name, "startswith" | "endswith") {
            let parts = match Kind::of(&args[0]) {
                Kind::Tuple => iterate(&args[0])?.iter().map(part).collect::<Result<Vec<_>, _>>()?,
                _ => vec![part(&args[0])?],
            };
            let fits = |p: &String| match inside {
                None => false,
                Some(t) if self.name == "startswith" => t.starts_with(p.as_str()),
                Some(t) => t.ends_with(p.as_str()),
            };
            return Ok(Value::from(parts.iter().any(fits)));
        }
        let part = part(&args[0])?;
        if self.name == "count" {
            return Ok(Value::from(inside.map_or(0, |t| match part.is_empty() {
                true => t.chars().count() + 1,
                false => t.matches(part.as_str()).count(),
            })));
        }
        let found =
            inside.and_then(|t| if self.name.starts_with('r') { t.rfind(&part) } else { t.find(&part) });
        match (found, inside) {
            (Some(at), Some(t)) => Ok(Value::from(start as i64 + t[..at].chars().count() as i64)),
            _ if self.name.ends_with("find") => Ok(Value::from(-1)),
            _ => Err(invalid("substring not found")),
        }
    }

    fn format(&self) -> Result<Value, Error> {
        let (args, names) = match self.args {
            [first @ .., last] if last.is_kwargs() && self.name == "format" => (first, pairs(last)?),
            [map] if self.name == "format_map" => (&[][..], pairs(map)?),
            args if self.name == "format" => (args, Vec::new()),
            _ => return Err(invalid("format_map() takes exactly one argument")),
        };
        let names: Vec<(String, Value)> =
            names.into_iter().filter_map(|(k, v)| Some((k.as_str()?.to_string(), v))).collect();
        formatted(self.text, self.safe, args, &names).map(|out| text_value(out, self.safe))
    }

    /// Methods with a boolean as the result.
    fn asks(&self) -> Result<Value, Error> {
        self.args(0, 0)?;
        let text = self.text;
        let all = |f: fn(char) -> bool| !text.is_empty() && text.chars().all(f);
        let cased = |c: char| c.is_uppercase() || c.is_lowercase();
        Ok(Value::from(match self.name {
            "isalpha" => all(char::is_alphabetic),
            "isalnum" => all(char::is_alphanumeric),
            "isascii" => text.is_ascii(),
            "isdecimal" => all(|c| c.is_ascii_digit() || c.is_numeric() && digit(c) && !superscript(c)),
            "isdigit" => all(|c| c.is_ascii_digit() || c.is_numeric() && digit(c)),
            "isnumeric" => all(char::is_numeric),
            "isspace" => all(is_space),
            "isprintable" => text.chars().all(super::text::is_printable),
            "islower" => text.chars().any(cased) && !text.chars().any(char::is_uppercase),
            "isupper" => text.chars().any(cased) && !text.chars().any(char::is_lowercase),
            "isidentifier" => {
                !text.starts_with(|c: char| c.is_numeric()) && all(|c| c.is_alphanumeric() || c == '_')
            }
            _ => is_title(text),
        }))
    }
}

fn superscript(c: char) -> bool {
    matches!(c, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉')
}

/// Digits of other scripts, and raised or lowered ones; no fractions or letters.
fn digit(c: char) -> bool {
    const ZEROS: [u32; 6] = [0x660, 0x6f0, 0x966, 0x9e6, 0xe50, 0xff10];
    superscript(c) || ZEROS.iter().any(|zero| (*zero..zero + 10).contains(&(c as u32)))
}

fn is_title(text: &str) -> bool {
    let (mut inside, mut any) = (false, false);
    for c in text.chars() {
        if c.is_uppercase() == inside && (c.is_uppercase() || c.is_lowercase()) {
            return false;
        }
        inside = c.is_uppercase() || c.is_lowercase();
        any |= inside;
    }
    any
}

fn swapped(text: &str) -> String {
    let swap = |c: char| match c.is_uppercase() {
        true => c.to_lowercase().collect::<String>(),
        false => c.to_uppercase().collect(),
    };
    text.chars().map(swap).collect()
}

fn title(text: &str) -> String {
    let (mut out, mut inside) = (String::new(), false);
    for c in text.chars() {
        match inside {
            true => out.extend(c.to_lowercase()),
            false => out.push_str(&titled(c)),
        }
        inside = c.is_uppercase() || c.is_lowercase();
    }
    out
}

/// `str.split` at white space, at most `most` times.
pub(crate) fn split_space(text: &str, most: usize, from_end: bool) -> Vec<&str> {
    let mut out = Vec::new();
    let mut rest = if from_end { text.trim_end_matches(is_space) } else { text.trim_start_matches(is_space) };
    while !rest.is_empty() && out.len() < most {
        let cut = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = cut else { break };
        let width = rest[at..].chars().next().map_or(1, char::len_utf8);
        if from_end {
            out.push(&rest[at + width..]);
            rest = rest[..at].trim_end_matches(is_space);
        } else {
            out.push(&rest[..at]);
            rest = rest[at + width..].trim_start_matches(is_space);
        }
    }
    if !rest.is_empty() {
        out.push(rest);
    }
    if from_end {
        out.reverse();
    }
    out
}

/// `str.replace`; a negative count replaces all.
fn replace(text: &str, from: &str, to: &str, count: i128) -> Result<String, Error> {
    let times = if from.is_empty() { text.chars().count() + 1 } else { text.matches(from).count() };
    let most = usize::try_from(count).unwrap_or(usize::MAX).min(times);
    spend_product(most, to.len())?;
    spend(text.len())?;
    Ok(text.replacen(from, to, most))
}
