//! `str.format` and format specifications.

use super::access::{attribute, item};
use super::digits::{Align, aligned, check_width, float_digits, int_digits};
use super::kind::{Kind, invalid};
use super::number::Number;
use super::percent::ascii;
use super::text::{entities, float_text, repr, text};
use crate::text::template::bounds::spend;
use minijinja::{Error, Value};

/// `format.format(*args, **names)`. With `safe`, fields are written with HTML's entities.
pub(crate) fn formatted(
    format: &str,
    safe: bool,
    args: &[Value],
    names: &[(String, Value)],
) -> Result<String, Error> {
    spend(format.len())?;
    Fields { args, names, safe, automatic: None, next: 0 }.fill(format, 2)
}

struct Fields<'a> {
    args: &'a [Value],
    names: &'a [(String, Value)],
    safe: bool,
    /// Whether fields are numbered by position, once one has shown it.
    automatic: Option<bool>,
    next: usize,
}

impl Fields<'_> {
    fn fill(&mut self, format: &str, depth: usize) -> Result<String, Error> {
        if depth == 0 {
            return Err(invalid("Max string recursion exceeded"));
        }
        let mut out = String::new();
        let mut rest = format;
        while let Some(at) = rest.find(['{', '}']) {
            out.push_str(&rest[..at]);
            let tail = &rest[at..];
            if tail.starts_with("{{") || tail.starts_with("}}") {
                out.push_str(&tail[..1]);
                rest = &tail[2..];
                continue;
            }
            if tail.starts_with('}') {
                return Err(invalid("Single '}' encountered in format string"));
            }
            let end = closing(&tail[1..], ('{', '}'))
                .ok_or_else(|| invalid("expected '}' before end of string"))?;
            let piece = self.field(&tail[1..=end], depth)?;
            spend(piece.len())?;
            out.push_str(&piece);
            rest = &tail[end + 2..];
        }
        out.push_str(rest);
        Ok(out)
    }

    fn field(&mut self, field: &str, depth: usize) -> Result<String, Error> {
        let end = name_end(field);
        let (name, behind) = field.split_at(end);
        let value = self.value(name)?;
        let (conversion, spec) = match behind.strip_prefix('!') {
            None => ("", behind.strip_prefix(':').unwrap_or("")),
            Some(c) => c.split_once(':').unwrap_or((c, "")),
        };
        let spec = if spec.contains(['{', '}']) { self.fill(spec, depth - 1)? } else { spec.to_string() };
        let value = match conversion {
            "" => value,
            "s" => Value::from(text(&value)?.into_owned()),
            "r" => Value::from(repr(&value)?),
            "a" => Value::from(ascii(&repr(&value)?)),
            other => return Err(invalid(format!("Unknown conversion specifier {other:?}"))),
        };
        let written = Spec::parse(&spec)?.write(&value)?;
        Ok(if self.safe && !value.is_safe() { entities(&written) } else { written })
    }

    /// The value of a field name: a number or a name, then attributes and items.
    fn value(&mut self, name: &str) -> Result<Value, Error> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut path) = name.split_at(end);
        let number: Option<usize> = if first.is_empty() { None } else { first.parse().ok() };
        let by_position = first.is_empty() || number.is_some();
        if by_position && *self.automatic.get_or_insert(first.is_empty()) != first.is_empty() {
            return Err(invalid(
                "cannot switch between automatic field numbering and manual field specification",
            ));
        }
        let mut value = if by_position {
            let n = number.unwrap_or(self.next);
            self.next += usize::from(first.is_empty());
            self.args.get(n).cloned()
        } else {
            self.names.iter().find(|(key, _)| key == first).map(|(_, v)| v.clone())
        }
        .ok_or_else(|| invalid(format!("the format has no value for the field {name:?}")))?;
        while !path.is_empty() {
            let (found, behind) = if let Some(inner) = path.strip_prefix('[') {
                let (key, behind) =
                    inner.split_once(']').ok_or_else(|| invalid("Missing ']' in format string"))?;
                let key = key.parse::<i64>().map_or_else(|_| Value::from(key), Value::from);
                (item(&value, &key)?, behind)
            } else {
                let inner = &path[1..];
                let end = inner.find(['.', '[']).unwrap_or(inner.len());
                (attribute(&value, &inner[..end])?, &inner[end..])
            };
            (value, path) = (found, behind);
        }
        Ok(value)
    }
}

/// The offset of the bracket that closes text behind an opening one.
pub(super) fn closing(text: &str, (open, close): (char, char)) -> Option<usize> {
    let mut depth = 1;
    text.char_indices().find_map(|(i, c)| {
        depth += i32::from(c == open) - i32::from(c == close);
        (depth == 0).then_some(i)
    })
}

fn name_end(field: &str) -> usize {
    let mut inside = false;
    let end = field.char_indices().find(|(_, c)| {
        inside = (inside || *c == '[') && *c != ']';
        !inside && matches!(c, '!' | ':')
    });
    end.map_or(field.len(), |(i, _)| i)
}

/// A format specification: `[[fill]align][sign][#][0][width][grouping][.precision][type]`.
#[derive(Debug, Default)]
struct Spec {
    fill: Option<char>,
    align: Option<Align>,
    sign: Option<char>,
    alternate: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    letter: Option<char>,
    empty: bool,
}

impl Spec {
    fn parse(text: &str) -> Result<Self, Error> {
        let mut this = Self { empty: text.is_empty(), ..Self::default() };
        let mut chars: &[char] = &text.chars().collect::<Vec<_>>();
        let align = |c: Option<&char>| match c {
            Some('<') => Some(Align::Left),
            Some('>') => Some(Align::Right),
            Some('^') => Some(Align::Center),
            Some('=') => Some(Align::Inside),
            _ => None,
        };
        if let Some(a) = align(chars.get(1)) {
            (this.fill, this.align) = (Some(chars[0]), Some(a));
            chars = &chars[2..];
        } else if let Some(a) = align(chars.first()) {
            this.align = Some(a);
            chars = &chars[1..];
        }
        let mut take = |of: &[char]| match chars.split_first() {
            Some((c, rest)) if of.contains(c) => {
                chars = rest;
                Some(*c)
            }
            _ => None,
        };
        this.sign = take(&['+', '-', ' ']);
        this.alternate = take(&['#']).is_some();
        if take(&['0']).is_some() {
            this.fill = this.fill.or(Some('0'));
            this.align = this.align.or(Some(Align::Inside));
        }
        const DIGITS: [char; 10] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9'];
        let number = |take: &mut dyn FnMut(&[char]) -> Option<char>| {
            let digits: String = std::iter::from_fn(|| take(&DIGITS)).collect();
            if digits.is_empty() { None } else { Some(digits.parse().unwrap_or(usize::MAX)) }
        };
        this.width = check_width(number(&mut take).unwrap_or(0))?;
        this.grouping = take(&[',', '_']);
        if take(&['.']).is_some() {
            let n = number(&mut take).ok_or_else(|| invalid("Format specifier missing precision"))?;
            this.precision = Some(check_width(n)?);
        }
        this.letter = chars.first().copied();
        match chars.len() > 1 {
            true => Err(invalid("Invalid format specifier")),
            false => Ok(this),
        }
    }

    fn write(&self, v: &Value) -> Result<String, Error> {
        match Kind::of(v) {
            _ if self.empty => Ok(text(v)?.into_owned()),
            Kind::Str => self.string(v.as_str().unwrap_or_default()),
            Kind::Bool if self.letter.is_none() => self.integer(i128::from(v.is_true()), 'd'),
            Kind::Bool | Kind::Int | Kind::Float => self.number(v),
            kind => Err(invalid(format!("unsupported format string passed to {}.__format__", kind.name()))),
        }
    }

    fn unknown(&self, kind: &str) -> Error {
        invalid(format!("Unknown format code {:?} for object of type '{kind}'", self.letter.unwrap_or(' ')))
    }

    fn string(&self, s: &str) -> Result<String, Error> {
        if !matches!(self.letter, None | Some('s')) {
            return Err(self.unknown("str"));
        }
        if self.sign.is_some()
            || self.alternate
            || self.grouping.is_some()
            || self.align == Some(Align::Inside) && self.fill != Some('0')
        {
            return Err(invalid("a sign, grouping or '=' is not allowed in a format of strings"));
        }
        let cut: String = s.chars().take(self.precision.unwrap_or(usize::MAX)).collect();
        let align = self.align.filter(|a| *a != Align::Inside).unwrap_or(Align::Left);
        aligned("", &cut, self.fill.unwrap_or(' '), align, self.width)
    }

    fn number(&self, v: &Value) -> Result<String, Error> {
        let kind = Kind::of(v).name();
        let number = Number::of(v).ok_or_else(|| self.unknown(kind))?;
        if let (Some(mark), Some(letter @ ('c' | 'n'))) = (self.grouping, self.letter) {
            return Err(invalid(format!("Cannot specify '{mark}' with '{letter}'.")));
        }
        match (number, self.letter) {
            (Number::Int(_), Some('c'))
                if self.sign.is_some() || self.alternate || self.precision.is_some() =>
            {
                Err(invalid("a sign, # or precision is not allowed in a format 'c'"))
            }
            (Number::Int(n), None | Some('n')) => self.integer(n, 'd'),
            (Number::Int(n), Some(c @ ('b' | 'o' | 'x' | 'X' | 'd'))) => self.integer(n, c),
            (Number::Int(n), Some('c')) => {
                let c = u32::try_from(n).ok().and_then(char::from_u32);
                let c = c.ok_or_else(|| invalid("%c arg not in range"))?.to_string();
                aligned("", &c, self.fill.unwrap_or(' '), self.align.unwrap_or(Align::Left), self.width)
            }
            (number, None | Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | 'n' | '%')) => {
                self.float(number.float())
            }
            _ => Err(self.unknown(kind)),
        }
    }

    fn integer(&self, n: i128, conversion: char) -> Result<String, Error> {
        if self.precision.is_some() {
            return Err(invalid("Precision not allowed in integer format specifier"));
        }
        let (digits, prefix) = int_digits(n, conversion);
        let every = if matches!(conversion, 'b' | 'o' | 'x' | 'X') { 4 } else { 3 };
        if every == 4 && self.grouping == Some(',') {
            return Err(invalid(format!("Cannot specify ',' with '{conversion}'.")));
        }
        self.signed(n < 0, if self.alternate { prefix } else { "" }, &digits, "", every)
    }

    fn float(&self, x: f64) -> Result<String, Error> {
        let digits = match (self.letter, self.precision) {
            (None, None) => float_text(x.abs()),
            (None, Some(p)) => float_digits(x, 'g', p, self.alternate, true),
            (Some('%'), p) => float_digits(x * 100.0, 'f', p.unwrap_or(6), self.alternate, false) + "%",
            (Some(c), p) => {
                float_digits(x, if c == 'n' { 'g' } else { c }, p.unwrap_or(6), self.alternate, false)
            }
        };
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        let (whole, rest) = digits.split_at(end);
        self.signed(x.is_sign_negative() && !x.is_nan(), "", whole, rest, 3)
    }

    /// Sign, grouped digits, and what stands behind them, in the field.
    fn signed(
        &self,
        negative: bool,
        prefix: &str,
        whole: &str,
        rest: &str,
        every: usize,
    ) -> Result<String, Error> {
        let sign = match (negative, self.sign) {
            (true, _) => "-",
            (_, Some('+')) => "+",
            (_, Some(' ')) => " ",
            _ => "",
        };
        let prefix = format!("{sign}{prefix}");
        let align = self.align.unwrap_or(Align::Right);
        let fill = self.fill.unwrap_or(' ');
        let mut whole = whole.to_string();
        if let Some(mark) = self.grouping {
            let least = if align == Align::Inside && fill == '0' {
                self.width.saturating_sub(prefix.chars().count() + rest.chars().count())
            } else {
                0
            };
            whole = grouped(&whole, mark, every, least);
        }
        aligned(&prefix, &(whole + rest), fill, align, self.width)
    }
}

/// Digits with a mark between groups of `every`; zeros in front up to `least` characters, never a mark first.
fn grouped(digits: &str, mark: char, every: usize, least: usize) -> String {
    let mut out: Vec<char> = Vec::new();
    let mut count = 0;
    let mut digits = digits.chars().rev();
    loop {
        let next = digits.next();
        if next.is_none() && out.len() >= least {
            break;
        }
        if count > 0 && count % every == 0 {
            out.push(mark);
        }
        out.push(next.unwrap_or('0'));
        count += 1;
    }
    out.into_iter().rev().collect()
}
