//! `%` formatting of texts.

use super::access::item;
use super::digits::{Align, aligned, check_width, float_digits, int_digits};
use super::format::closing;
use super::kind::{Kind, integer, invalid};
use super::number::{Number, too_large};
use super::text::{entities, escape_code, repr, text};
use crate::text::template::bounds::spend;
use minijinja::{Error, Value};

/// `format % args`. With `safe`, texts are written with HTML's entities.
pub(crate) fn percent(format: &str, safe: bool, args: &Value) -> Result<String, Error> {
    let kind = Kind::of(args);
    let positional = match kind {
        Kind::Tuple => super::access::iterate(args)?,
        _ => vec![args.clone()],
    };
    let mapping = matches!(kind, Kind::Dict | Kind::List | Kind::Undefined | Kind::Range);
    let mut given = Given { args, positional, next: 0, mapping };
    let mut out = String::new();
    let mut rest = format;
    spend(format.len())?;
    while let Some((before, after)) = rest.split_once('%') {
        out.push_str(before);
        let (conversion, behind) = Conversion::parse(after, &mut given)?;
        rest = behind;
        let piece = conversion.write(&mut given, safe)?;
        spend(piece.len())?;
        out.push_str(&piece);
    }
    out.push_str(rest);
    match given.next < given.positional.len() && !mapping {
        true => Err(invalid("not all arguments converted during string formatting")),
        false => Ok(out),
    }
}

struct Given<'a> {
    args: &'a Value,
    positional: Vec<Value>,
    next: usize,
    mapping: bool,
}

impl Given<'_> {
    fn next(&mut self) -> Result<Value, Error> {
        let v = self.positional.get(self.next).cloned();
        self.next += 1;
        v.ok_or_else(|| invalid("not enough arguments for format string"))
    }

    fn width(&mut self) -> Result<i128, Error> {
        integer(&self.next()?).ok_or_else(|| invalid("* wants int"))
    }
}

#[derive(Default)]
struct Conversion {
    key: Option<String>,
    left: bool,
    sign: bool,
    blank: bool,
    alternate: bool,
    zero: bool,
    width: usize,
    precision: Option<usize>,
    letter: char,
}

impl Conversion {
    /// Parses a conversion behind its `%`; also returns the text behind it.
    fn parse<'f>(mut text: &'f str, given: &mut Given<'_>) -> Result<(Self, &'f str), Error> {
        let mut this = Self::default();
        if let Some(inner) = text.strip_prefix('(') {
            let end = closing(inner, ('(', ')')).ok_or_else(|| invalid("incomplete format key"))?;
            if !given.mapping {
                return Err(invalid("format requires a mapping"));
            }
            this.key = Some(inner[..end].to_string());
            text = &inner[end + 1..];
        }
        let flags = text.trim_start_matches(['-', '+', ' ', '#', '0']);
        for flag in text[..text.len() - flags.len()].chars() {
            match flag {
                '-' => this.left = true,
                '+' => this.sign = true,
                ' ' => this.blank = true,
                '#' => this.alternate = true,
                _ => this.zero = true,
            }
        }
        text = flags;
        let mut number = |text: &mut &'f str| -> Result<Option<i128>, Error> {
            if let Some(behind) = text.strip_prefix('*') {
                *text = behind;
                return given.width().map(Some);
            }
            let behind = text.trim_start_matches(|c: char| c.is_ascii_digit());
            let digits = &text[..text.len() - behind.len()];
            *text = behind;
            if digits.is_empty() { Ok(None) } else { Ok(Some(digits.parse().unwrap_or(i128::MAX))) }
        };
        if let Some(width) = number(&mut text)? {
            this.left |= width < 0;
            this.width = check_width(usize::try_from(width.unsigned_abs()).unwrap_or(usize::MAX))?;
        }
        if let Some(behind) = text.strip_prefix('.') {
            text = behind;
            let n = number(&mut text)?.unwrap_or(0).max(0);
            this.precision = Some(check_width(usize::try_from(n).unwrap_or(usize::MAX))?);
        }
        text = text.strip_prefix(['h', 'l', 'L']).unwrap_or(text);
        let mut chars = text.chars();
        this.letter = chars.next().ok_or_else(|| invalid("incomplete format"))?;
        Ok((this, chars.as_str()))
    }

    fn write(&self, given: &mut Given<'_>, safe: bool) -> Result<String, Error> {
        if self.letter == '%' {
            return Ok("%".into());
        }
        let value = match &self.key {
            None => given.next()?,
            Some(key) => {
                given.next = given.positional.len();
                let found = if Kind::of(given.args) == Kind::Dict { item_of(given.args, key) } else { None };
                found.ok_or_else(|| invalid(format!("the format names {key:?}, which the mapping lacks")))?
            }
        };
        match self.letter {
            's' | 'r' | 'a' => {
                let mut plain = match self.letter {
                    's' => text(&value)?.into_owned(),
                    'r' => repr(&value)?,
                    _ => ascii(&repr(&value)?),
                };
                if safe && !(self.letter == 's' && value.is_safe()) {
                    plain = entities(&plain);
                }
                if let Some(most) = self.precision {
                    plain = plain.chars().take(most).collect();
                }
                self.field("", &plain, ' ')
            }
            'c' => {
                let c = match (integer(&value), value.as_str()) {
                    (Some(n), _) => u32::try_from(n).ok().and_then(char::from_u32).map(String::from),
                    (None, Some(s)) if s.chars().count() == 1 => Some(s.to_string()),
                    _ => None,
                };
                self.field("", &c.ok_or_else(|| invalid("%c requires int or char"))?, ' ')
            }
            'd' | 'i' | 'u' | 'o' | 'x' | 'X' => self.integer(&value),
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
                let x =
                    Number::of(&value).ok_or_else(|| invalid("a number is needed by the format"))?.float();
                let body = float_digits(x, self.letter, self.precision.unwrap_or(6), self.alternate, false);
                self.signed(x.is_sign_negative() && !x.is_nan(), "", &body)
            }
            other => Err(invalid(format!("unsupported format character {other:?}"))),
        }
    }

    fn integer(&self, value: &Value) -> Result<String, Error> {
        let n = match Number::of(value) {
            Some(Number::Int(n)) => Some(n),
            Some(Number::Float(x)) if x.is_finite() && matches!(self.letter, 'd' | 'i' | 'u') => {
                Some(x.trunc()).filter(|x| x.abs() < 1e38).map(|x| Some(x as i128)).ok_or_else(too_large)?
            }
            _ => None,
        };
        let n = n.ok_or_else(|| {
            invalid(format!("%{} format: a number is required, not {}", self.letter, Kind::of(value).name()))
        })?;
        let (mut digits, prefix) = int_digits(n, self.letter);
        if let Some(least) = self.precision {
            digits = aligned("", &digits, '0', Align::Right, least)?;
        }
        self.signed(n < 0, if self.alternate { prefix } else { "" }, &digits)
    }

    fn signed(&self, negative: bool, prefix: &str, body: &str) -> Result<String, Error> {
        let sign = match (negative, self.sign, self.blank) {
            (true, ..) => "-",
            (_, true, _) => "+",
            (_, _, true) => " ",
            _ => "",
        };
        self.field(&format!("{sign}{prefix}"), body, if self.zero { '0' } else { ' ' })
    }

    fn field(&self, prefix: &str, body: &str, fill: char) -> Result<String, Error> {
        match (self.left, fill) {
            (true, _) => aligned(prefix, body, ' ', Align::Left, self.width),
            (_, '0') => aligned(prefix, body, '0', Align::Inside, self.width),
            _ => aligned(prefix, body, fill, Align::Right, self.width),
        }
    }
}

fn item_of(args: &Value, key: &str) -> Option<Value> {
    let key = Value::from(key);
    args.as_object()?.get_value(&key).and_then(|_| item(args, &key).ok())
}

/// Escapes all characters but ASCII's.
pub(super) fn ascii(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if c.is_ascii() { out.push(c) } else { escape_code(&mut out, c) }
    }
    out
}
