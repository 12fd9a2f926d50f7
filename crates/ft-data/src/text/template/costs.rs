//! Costs of operations, spent before execution.

use super::bounds::{spend, spend_product, weigh};
use minijinja::{Error, ErrorKind, Value};

/// Maximum width or precision in a format.
const WIDEST: usize = 4096;

/// An error for invalid operations in a template.
pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Cost of starting to iterate over a value.
pub(super) fn shallow(value: &Value) -> usize {
    match value.as_str() {
        Some(s) => s.len(),
        None => 8 * value.len().unwrap_or(0),
    }
}

/// Spends the cost of formatting a value; quotes and escapes in lists may take several bytes per byte.
pub(super) fn weigh_text(value: &Value) -> Result<(), Error> {
    if value.as_object().is_none() {
        return weigh(value);
    }
    (0..4).try_for_each(|_| weigh(value))
}

/// Spends an upper bound of the replaced text.
pub(super) fn spend_replace(text: &str, from: &str, to: &str) -> Result<(), Error> {
    spend(text.len())?;
    let times = if from.is_empty() { text.len() + 1 } else { text.matches(from).count() };
    spend_product(times, to.len())
}

/// Spends the cost of splitting a text.
pub(super) fn spend_split(text: &str, separator: Option<&str>) -> Result<(), Error> {
    spend(text.len())?;
    let pieces = match separator {
        Some("") => text.len() + 2,
        Some(s) => text.matches(s).count() + 1,
        None => text.bytes().filter(u8::is_ascii_whitespace).count() + 1,
    };
    spend_product(pieces, 64)
}

/// Spends the cost of formatting, and refuses excessive widths.
pub(super) fn check_widths(format: &str, args: &[Value]) -> Result<(), Error> {
    let wide = |n: usize| invalid(format!("a format asks for {n} characters; at most {WIDEST}"));
    for digits in format.split(|c: char| !c.is_ascii_digit()).filter(|d| !d.is_empty()) {
        let n = digits.parse().unwrap_or(usize::MAX);
        if n > WIDEST {
            return Err(wide(n));
        }
        spend(n)?;
    }
    // widths given as arguments
    let nested = format.contains('*') || format.split('{').any(|p| p.ends_with(':') || p.ends_with('.'));
    if nested
        && let Some(n) = args.iter().filter_map(Value::as_i64).find(|n| n.unsigned_abs() > WIDEST as u64)
    {
        return Err(wide(usize::try_from(n.unsigned_abs()).unwrap_or(usize::MAX)));
    }
    let places = format.bytes().filter(|b| matches!(b, b'%' | b'{')).count();
    spend(format.len())?;
    for _ in 0..places {
        spend(if nested { WIDEST } else { 64 })?;
        args.iter().try_for_each(weigh_text)?;
    }
    Ok(())
}
