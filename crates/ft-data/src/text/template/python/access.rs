//! Attributes, items, slices and iteration.

use super::compare::check_key;
use super::kind::{Bound, Group, Kind, Range, integer, invalid, text_value, tuple};
use super::methods;
use crate::text::template::bounds::{spend, spend_product, weigh};
use minijinja::{Error, ErrorKind, Value};

/// `object.name`: a method or an attribute, else an item.
pub(crate) fn attribute(object: &Value, name: &str) -> Result<Value, Error> {
    match Kind::of(object) {
        Kind::Undefined if name.starts_with("__") => Ok(Value::UNDEFINED),
        Kind::Undefined => Err(undefined_has_no(name)),
        Kind::Other => Ok(object.get_attr(name).unwrap_or_default()),
        kind => match methods::known(kind, name) {
            Some(safe) => Ok(bound(object, name, safe)),
            None => Ok(object
                .as_object()
                .and_then(|o| named(kind, o.get_value(&Value::from(name))))
                .unwrap_or_default()),
        },
    }
}

/// Items of dicts and groups have names, those of lists only numbers.
fn named(kind: Kind, found: Option<Value>) -> Option<Value> {
    found.filter(|_| matches!(kind, Kind::Dict | Kind::Tuple))
}

/// A method, or undefined if it would change the value, as in Jinja2's immutable sandbox.
fn bound(object: &Value, name: &str, safe: bool) -> Value {
    match safe {
        true => Value::from_object(Bound { object: object.clone(), name: name.to_string() }),
        false => Value::UNDEFINED,
    }
}

fn undefined_has_no(name: &str) -> Error {
    Error::new(ErrorKind::UndefinedError, format!("{name} is asked of an undefined value"))
}

/// `object[key]`: an item, else a method or an attribute.
pub(crate) fn item(object: &Value, key: &Value) -> Result<Value, Error> {
    let kind = Kind::of(object);
    let found = match kind {
        Kind::Undefined => return Err(undefined_has_no("an item")),
        Kind::Dict if check_key(key).is_ok() => object.as_object().and_then(|o| o.get_value(key)),
        Kind::Str => integer(key).map(|i| nth(object.as_str().unwrap_or_default(), i)).transpose()?.flatten(),
        Kind::List | Kind::Tuple | Kind::Range => {
            let length = object.len().unwrap_or(0);
            let i = integer(key).and_then(|i| position(i, length));
            i.and_then(|i| object.as_object()?.get_value(&Value::from(i)))
        }
        _ => None,
    };
    match (found, key.as_str()) {
        (Some(found), _) => Ok(found),
        (None, Some(name)) => match (kind, methods::known(kind, name)) {
            (Kind::Other, _) => Ok(object.get_attr(name).unwrap_or_default()),
            (_, Some(safe)) => Ok(bound(object, name, safe)),
            _ if object.downcast_object_ref::<Group>().is_some() => attribute(object, name),
            _ => Ok(Value::UNDEFINED),
        },
        (None, None) => Ok(Value::UNDEFINED),
    }
}

fn position(i: i128, length: usize) -> Option<usize> {
    let i = if i < 0 { i + length as i128 } else { i };
    usize::try_from(i).ok().filter(|i| *i < length)
}

fn nth(text: &str, i: i128) -> Result<Option<Value>, Error> {
    spend(text.len())?;
    let i = position(i, if i < 0 { text.chars().count() } else { text.len() });
    Ok(i.and_then(|i| text.chars().nth(i)).map(|c| Value::from(c.to_string())))
}

/// The items of a value in order; for texts, the characters. Empties a generator.
///
/// # Errors
/// A value without items, or the error at which a generator ends.
pub(crate) fn iterate(v: &Value) -> Result<Vec<Value>, Error> {
    match Kind::of(v) {
        Kind::Undefined => Ok(Vec::new()),
        Kind::Str => {
            let text = v.as_str().unwrap_or_default();
            spend_product(text.len(), 32)?;
            Ok(text.chars().map(|c| Value::from(c.to_string())).collect())
        }
        Kind::List | Kind::Tuple | Kind::Dict | Kind::View | Kind::Range | Kind::Generator => {
            spend_product(v.len().unwrap_or(0), 32)?;
            v.try_iter()?.checked().collect()
        }
        kind => Err(invalid(format!("'{}' object is not iterable", kind.name()))),
    }
}

/// `len(v)`.
pub(crate) fn length(v: &Value) -> Result<usize, Error> {
    match Kind::of(v) {
        Kind::Undefined => Ok(0),
        Kind::Str => {
            let text = v.as_str().unwrap_or_default();
            spend(text.len())?;
            Ok(text.chars().count())
        }
        Kind::List | Kind::Tuple | Kind::Dict | Kind::View | Kind::Range => Ok(v.len().unwrap_or(0)),
        kind => Err(invalid(format!("object of type '{}' has no len()", kind.name()))),
    }
}

/// A text, list or tuple `n` times.
pub(crate) fn repeat(v: &Value, n: i128) -> Result<Value, Error> {
    let n = usize::try_from(n.max(0)).unwrap_or(usize::MAX);
    if let Some(text) = v.as_str() {
        spend_product(text.len(), n)?;
        return Ok(text_value(text.repeat(n), v.is_safe()));
    }
    let items = iterate(v)?;
    let mut out = Vec::new();
    for _ in 0..if items.is_empty() { 0 } else { n } {
        items.iter().try_for_each(weigh)?;
        out.extend_from_slice(&items);
    }
    Ok(if Kind::of(v) == Kind::Tuple { tuple(out) } else { Value::from(out) })
}

/// `v[start:stop:step]`.
pub(crate) fn slice(v: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    let bound = |v: &Value| match integer(v) {
        Some(n) => Ok(Some(i64::try_from(n).unwrap_or(if n < 0 { i64::MIN } else { i64::MAX }))),
        None if v.is_none() => Ok(None),
        None => Err(invalid("slice indices must be integers or None")),
    };
    let kind = Kind::of(v);
    if !matches!(kind, Kind::Str | Kind::List | Kind::Tuple | Kind::Range) {
        return Err(invalid(format!("'{}' object cannot be sliced", kind.name())));
    }
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(invalid("slice step cannot be zero"));
    }
    if let Some(text) = v.as_str() {
        spend(text.len().saturating_mul(4))?;
        let chars: Vec<char> = text.chars().collect();
        let cut = indices(start, stop, step, chars.len()).map(|i| chars[i]).collect();
        return Ok(text_value(cut, v.is_safe()));
    }
    if let Some(range) = v.downcast_object_ref::<Range>() {
        return sliced_range(range, start, stop, step);
    }
    let items = iterate(v)?;
    let out: Vec<Value> = indices(start, stop, step, items.len()).map(|i| items[i].clone()).collect();
    Ok(if kind == Kind::Tuple { tuple(out) } else { Value::from(out) })
}

fn sliced_range(range: &Range, start: Option<i64>, stop: Option<i64>, step: i64) -> Result<Value, Error> {
    let (start, stop) = bounds(start, stop, step, i64::try_from(range.len()).unwrap_or(0));
    let at = |i: i64| range.start + i128::from(i) * range.step;
    Range::value(at(start), at(stop), range.step.saturating_mul(i128::from(step)))
}

/// The first index of a slice of `len` items, and the first beyond it.
fn bounds(start: Option<i64>, stop: Option<i64>, step: i64, len: i64) -> (i64, i64) {
    let from_end = |i: i64| if i < 0 { i.saturating_add(len) } else { i };
    if step > 0 {
        (start.map_or(0, from_end).clamp(0, len), stop.map_or(len, from_end).clamp(0, len))
    } else {
        let (start, stop) = (start.map_or(len - 1, from_end), stop.map_or(-1, |s| from_end(s).max(-1)));
        (start.clamp(-1, len - 1), stop.min(len - 1))
    }
}

/// The indices of a slice of `len` items.
fn indices(start: Option<i64>, stop: Option<i64>, step: i64, len: usize) -> Box<dyn Iterator<Item = usize>> {
    let (start, stop) = bounds(start, stop, step, i64::try_from(len).unwrap_or(i64::MAX));
    let by = usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX);
    match step > 0 {
        true => Box::new((start..stop).step_by(by).map(|i| i as usize)),
        false => Box::new((stop + 1..=start).rev().step_by(by).map(|i| i as usize)),
    }
}
