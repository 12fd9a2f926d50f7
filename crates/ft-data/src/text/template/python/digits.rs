//! Numbers in formats: conversions of C's `printf`, signs, widths and fills.

use super::kind::invalid;
use crate::text::template::bounds::{spend, spend_product};
use minijinja::Error;

/// Maximum width or precision in a format.
const WIDEST: usize = 4096;

/// Checks a width or precision.
pub(super) fn check_width(n: usize) -> Result<usize, Error> {
    spend_product(n.min(WIDEST), 4)?;
    if n > WIDEST {
        return Err(invalid(format!("a format asks for {n} characters; at most {WIDEST}")));
    }
    Ok(n)
}

/// The digits of a float without sign, by conversion `e`, `f` or `g` (capitals as in Python). `dotted` keeps a
/// digit behind the point in `g`, as Python's format without a conversion does; `alternate` keeps zeros.
pub(super) fn float_digits(
    x: f64,
    conversion: char,
    precision: usize,
    alternate: bool,
    dotted: bool,
) -> String {
    let x = x.abs();
    let lower = conversion.to_ascii_lowercase();
    let text = if x.is_nan() {
        "nan".to_string()
    } else if x.is_infinite() {
        "inf".to_string()
    } else {
        match lower {
            'f' => point(format!("{x:.precision$}"), alternate),
            'e' => exponent(x, precision, alternate),
            _ => general(x, precision.max(1), alternate, dotted),
        }
    };
    if conversion.is_ascii_uppercase() { text.to_uppercase() } else { text }
}

fn point(text: String, alternate: bool) -> String {
    if alternate && !text.contains('.') { text + "." } else { text }
}

fn exponent(x: f64, precision: usize, alternate: bool) -> String {
    let text = format!("{x:.precision$e}");
    let (mantissa, power) = text.split_once('e').unwrap_or((&text, "0"));
    let power: i32 = power.parse().unwrap_or(0);
    format!("{}e{power:+03}", point(mantissa.to_string(), alternate))
}

fn general(x: f64, precision: usize, alternate: bool, dotted: bool) -> String {
    let scientific = format!("{x:.*e}", precision - 1);
    let power: i32 = scientific.split_once('e').and_then(|(_, p)| p.parse().ok()).unwrap_or(0);
    let most = precision as i32 - i32::from(dotted);
    let trim = |text: String| match text.contains('.') && !alternate {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text,
    };
    if (-4..most).contains(&power) {
        let digits = usize::try_from(precision as i32 - 1 - power).unwrap_or(0);
        let text = trim(format!("{x:.digits$}"));
        return match dotted && !text.contains('.') {
            true => text + ".0",
            false => point(text, alternate),
        };
    }
    let text = exponent(x, precision - 1, alternate);
    match text.split_once('e') {
        Some((mantissa, power)) => format!("{}e{power}", trim(mantissa.to_string())),
        None => text,
    }
}

/// The digits of an integer without sign in base 2, 8, 10 or 16, and the prefix that `#` asks for.
pub(super) fn int_digits(n: i128, conversion: char) -> (String, &'static str) {
    let n = n.unsigned_abs();
    match conversion {
        'b' => (format!("{n:b}"), "0b"),
        'o' => (format!("{n:o}"), "0o"),
        'x' => (format!("{n:x}"), "0x"),
        'X' => (format!("{n:X}"), "0X"),
        _ => (n.to_string(), ""),
    }
}

/// Alignment of a text in a field.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Align {
    Left,
    Right,
    Center,
    /// Fill between sign and digits.
    Inside,
}

/// Fills `prefix` and `body` up to `width` characters.
pub(super) fn aligned(
    prefix: &str,
    body: &str,
    fill: char,
    align: Align,
    width: usize,
) -> Result<String, Error> {
    let missing = width.saturating_sub(prefix.chars().count() + body.chars().count());
    spend(prefix.len() + body.len())?;
    spend_product(missing, fill.len_utf8())?;
    let fills = |n: usize| fill.to_string().repeat(n);
    Ok(match align {
        Align::Left => format!("{prefix}{body}{}", fills(missing)),
        Align::Right => format!("{}{prefix}{body}", fills(missing)),
        Align::Center => format!("{}{prefix}{body}{}", fills(missing / 2), fills(missing - missing / 2)),
        Align::Inside => format!("{prefix}{}{body}", fills(missing)),
    })
}
