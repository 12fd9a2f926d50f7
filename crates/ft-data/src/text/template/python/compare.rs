//! Equality, order and containment.

use super::access::iterate;
use super::kind::{Kind, float, integer, invalid};
use crate::text::template::bounds::{spend, weigh};
use minijinja::{Error, ErrorKind, Value};
use std::cmp::Ordering;

/// A comparison by the engine's name of its operator.
pub(crate) fn holds(op: &str, a: &Value, b: &Value) -> Result<bool, Error> {
    Ok(match op {
        "Eq" => equal(a, b)?,
        "Ne" => !equal(a, b)?,
        "Lt" => order(a, b)? == Some(Ordering::Less),
        "Lte" => order(a, b)?.is_some_and(Ordering::is_le),
        "Gt" => order(a, b)? == Some(Ordering::Greater),
        "Gte" => order(a, b)?.is_some_and(Ordering::is_ge),
        "In" => contains(b, a)?,
        "NotIn" => !contains(b, a)?,
        _ => return Err(invalid(format!("the comparison {op} is not built yet"))),
    })
}

/// `a == b`.
pub(crate) fn equal(a: &Value, b: &Value) -> Result<bool, Error> {
    let (ka, kb) = (Kind::of(a), Kind::of(b));
    if ka.is_number() && kb.is_number() {
        return Ok(numbers(a, b) == Some(Ordering::Equal));
    }
    Ok(match (ka, kb) {
        (Kind::Str, Kind::Str) => {
            spend(a.as_str().map_or(0, str::len))?;
            a.as_str() == b.as_str()
        }
        (Kind::List, Kind::List) | (Kind::Tuple, Kind::Tuple) | (Kind::Range, Kind::Range) => {
            if a.len() != b.len() {
                return Ok(false);
            }
            for (x, y) in iterate(a)?.into_iter().zip(iterate(b)?) {
                if !equal(&x, &y)? {
                    return Ok(false);
                }
            }
            true
        }
        (Kind::Dict, Kind::Dict) => same_dicts(a, b)?,
        (Kind::Generator | Kind::View | Kind::Other, _) => a.as_object().is_some() && a == b,
        (ka, kb) => ka == kb && matches!(ka, Kind::Undefined | Kind::None),
    })
}

fn same_dicts(a: &Value, b: &Value) -> Result<bool, Error> {
    weigh(a)?;
    let (Some(x), Some(y)) = (a.as_object(), b.as_object()) else { return Ok(false) };
    if a.len() != b.len() {
        return Ok(false);
    }
    for (key, value) in x.try_iter_pairs().into_iter().flatten() {
        match y.get_value(&key) {
            Some(other) if equal(&value, &other)? => {}
            _ => return Ok(false),
        }
    }
    Ok(true)
}

/// The order of two numbers; `None` with a NaN.
fn numbers(a: &Value, b: &Value) -> Option<Ordering> {
    match (integer(a), integer(b), float(a), float(b)) {
        (Some(x), Some(y), ..) => Some(x.cmp(&y)),
        (.., Some(x), Some(y)) => x.partial_cmp(&y),
        (Some(x), _, _, Some(y)) => int_with_float(x, y),
        (_, Some(y), Some(x), _) => int_with_float(y, x).map(Ordering::reverse),
        _ => None,
    }
}

/// Exact, where the float could not hold the integer.
fn int_with_float(n: i128, x: f64) -> Option<Ordering> {
    if x.is_nan() || x.abs() >= 1e38 {
        return 0.0.partial_cmp(&x);
    }
    let whole = x.trunc() as i128;
    Some(n.cmp(&whole).then_with(|| 0.0.partial_cmp(&x.fract()).unwrap_or(Ordering::Equal)))
}

/// The order of two values; `None` if no comparison holds (NaN).
pub(crate) fn order(a: &Value, b: &Value) -> Result<Option<Ordering>, Error> {
    let (ka, kb) = (Kind::of(a), Kind::of(b));
    if ka.is_number() && kb.is_number() {
        return Ok(numbers(a, b));
    }
    match (ka, kb) {
        (Kind::Str, Kind::Str) => {
            let (a, b) = (a.as_str().unwrap_or_default(), b.as_str().unwrap_or_default());
            spend(a.len().min(b.len()))?;
            Ok(Some(a.cmp(b)))
        }
        (Kind::List, Kind::List) | (Kind::Tuple, Kind::Tuple) => {
            for (x, y) in iterate(a)?.into_iter().zip(iterate(b)?) {
                if !equal(&x, &y)? {
                    return order(&x, &y);
                }
            }
            Ok(Some(a.len().cmp(&b.len())))
        }
        (Kind::Undefined, _) | (_, Kind::Undefined) => Err(Error::from(ErrorKind::UndefinedError)),
        _ => Err(invalid(format!(
            "'<' not supported between instances of '{}' and '{}'",
            ka.name(),
            kb.name()
        ))),
    }
}

/// Sorts by keys like Python: stable, and with an error for types without order.
pub(crate) fn sort<T>(items: &mut [T], reverse: bool, key: impl Fn(&T) -> &Value) -> Result<(), Error> {
    let mut failed = None;
    items.sort_by(|a, b| {
        let (a, b) = if reverse { (b, a) } else { (a, b) };
        let found = order(key(a), key(b)).unwrap_or_else(|e| {
            failed.get_or_insert(e);
            None
        });
        found.unwrap_or(Ordering::Equal)
    });
    failed.map_or(Ok(()), Err)
}

/// `value in container`.
pub(crate) fn contains(container: &Value, value: &Value) -> Result<bool, Error> {
    match Kind::of(container) {
        Kind::Undefined => Ok(false),
        Kind::Str => {
            let text = container.as_str().unwrap_or_default();
            spend(text.len())?;
            let part = value.as_str().ok_or_else(|| {
                let name = Kind::of(value).name();
                invalid(format!("'in <string>' requires string as left operand, not {name}"))
            })?;
            Ok(text.contains(part))
        }
        Kind::Dict => {
            check_key(value)?;
            Ok(container.as_object().is_some_and(|o| o.get_value(value).is_some()))
        }
        _ => {
            for item in iterate(container)? {
                if equal(&item, value)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
    }
}

/// Refuses keys without a hash: lists and dicts.
pub(crate) fn check_key(key: &Value) -> Result<(), Error> {
    weigh(key)?;
    match Kind::of(key) {
        k @ (Kind::List | Kind::Dict) => Err(invalid(format!("unhashable type: '{}'", k.name()))),
        Kind::Tuple => iterate(key)?.iter().try_for_each(check_key),
        _ => Ok(()),
    }
}
