//! Methods of lists, tuples, dicts and numbers, and the call of a method of any value.

use super::access::{attribute, iterate};
use super::compare::{check_key, equal};
use super::kind::{Kind, View, from_int, integer, invalid, tuple};
use super::{number, strings};
use crate::text::template::bounds::{spend, weigh};
use minijinja::{Error, ErrorKind, State, Value};

const LIST: &[&str] = &["copy", "count", "index"];
const TUPLE: &[&str] = &["count", "index"];
const DICT: &[&str] = &["copy", "fromkeys", "get", "items", "keys", "values"];
const INT: &[&str] = &["bit_count", "bit_length", "conjugate", "is_integer"];
const FLOAT: &[&str] = &["conjugate", "hex", "is_integer"];
/// Methods that change a list or dict: undefined, as in Jinja2's immutable sandbox.
const LIST_CHANGES: &[&str] = &["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"];
const DICT_CHANGES: &[&str] = &["clear", "pop", "popitem", "setdefault", "update"];

/// Whether a type has a method, and whether templates may call it.
pub(crate) fn known(kind: Kind, name: &str) -> Option<bool> {
    const NONE: &[&str] = &[];
    let (methods, changes) = match kind {
        Kind::Str => (strings::METHODS.as_slice(), NONE),
        Kind::List => (LIST, LIST_CHANGES),
        Kind::Tuple | Kind::Range => (TUPLE, NONE),
        Kind::Dict => (DICT, DICT_CHANGES),
        Kind::Int | Kind::Bool => (INT, NONE),
        Kind::Float => (FLOAT, NONE),
        _ => return None,
    };
    match methods.contains(&name) {
        true => Some(true),
        false => (name.starts_with("__") || changes.contains(&name)).then_some(false),
    }
}

/// Calls `object.name(*args)`.
pub(crate) fn call(
    state: &mut State<'_, '_>,
    object: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let args = given(args);
    args.iter().try_for_each(weigh)?;
    let kind = Kind::of(object);
    match (kind, known(kind, name)) {
        (Kind::Str, Some(true)) => strings::call(object, name, args),
        (Kind::List | Kind::Tuple | Kind::Range, Some(true)) => of_list(object, name, args),
        (Kind::Dict, Some(true)) => of_dict(object, name, args),
        (Kind::Int | Kind::Bool | Kind::Float, Some(true)) => of_number(object, name, args),
        (Kind::Other, _) => match object.call_method(state, name, args) {
            Err(e) if e.kind() == ErrorKind::UnknownMethod => attribute(object, name)?.call(state, args),
            done => done,
        },
        _ => {
            let f = attribute(object, name)?;
            if f.is_undefined() {
                return Err(invalid(format!("'{} object' has no attribute '{name}' to call", kind.name())));
            }
            f.call(state, args)
        }
    }
}

/// Positional arguments, between `least` and `most` of them.
pub(super) fn positional<'a>(
    name: &str,
    args: &'a [Value],
    least: usize,
    most: usize,
) -> Result<&'a [Value], Error> {
    if args.iter().any(Value::is_kwargs) {
        return Err(invalid(format!("{name}() takes no keyword arguments")));
    }
    match (least..=most).contains(&args.len()) {
        true => Ok(args),
        false => {
            Err(invalid(format!("{name}() takes {least} to {most} arguments, and {} were given", args.len())))
        }
    }
}

/// Arguments by position or keyword, in the order of `names`.
pub(crate) fn bind(function: &str, names: &[&str], args: &[Value]) -> Result<Vec<Option<Value>>, Error> {
    let (args, keywords) = match args.split_last() {
        Some((last, first)) if last.is_kwargs() => (first, pairs(last)?),
        _ => (args, Vec::new()),
    };
    if args.len() > names.len() {
        return Err(invalid(format!("{function}() takes at most {} arguments", names.len())));
    }
    let mut out: Vec<Option<Value>> = args.iter().cloned().map(Some).collect();
    out.resize(names.len(), None);
    for (key, value) in keywords {
        let slot = names.iter().position(|n| key.as_str() == Some(n)).map(|i| &mut out[i]);
        match slot {
            Some(slot @ None) => *slot = Some(value),
            Some(_) => return Err(invalid(format!("{function}() got multiple values for argument '{key}'"))),
            None => return Err(invalid(format!("{function}() got an unexpected keyword argument '{key}'"))),
        }
    }
    Ok(out)
}

fn of_list(object: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    match name {
        "copy" => {
            positional(name, args, 0, 0)?;
            Ok(Value::from(iterate(object)?))
        }
        "count" => {
            let args = positional(name, args, 1, 1)?;
            let mut count = 0;
            for item in iterate(object)? {
                count += i64::from(equal(&item, &args[0])?);
            }
            Ok(Value::from(count))
        }
        _ => {
            let most = if Kind::of(object) == Kind::Range { 1 } else { 3 };
            let args = positional(name, args, 1, most)?;
            let items = iterate(object)?;
            let bound = |i: usize, default: usize| match args.get(i) {
                None => Ok(default),
                Some(v) => {
                    let n = integer(v).ok_or_else(|| invalid("slice indices must be integers"))?;
                    let n = if n < 0 { n + items.len() as i128 } else { n };
                    Ok::<_, Error>(usize::try_from(n.max(0)).unwrap_or(usize::MAX).min(items.len()))
                }
            };
            let (start, stop) = (bound(1, 0)?, bound(2, items.len())?);
            for (i, item) in items.iter().enumerate().take(stop).skip(start) {
                if equal(item, &args[0])? {
                    return Ok(Value::from(i));
                }
            }
            Err(invalid(format!("index(): the value is not in the {}", Kind::of(object).name())))
        }
    }
}

/// The arguments of a call, without keywords if `**map` gave none.
pub(crate) fn given(args: &[Value]) -> &[Value] {
    match args {
        [first @ .., last] if last.is_kwargs() && last.len() == Some(0) => first,
        _ => args,
    }
}

/// The pairs of a dict.
pub(crate) fn pairs(dict: &Value) -> Result<Vec<(Value, Value)>, Error> {
    spend(64 * dict.len().unwrap_or(0))?;
    Ok(dict.as_object().and_then(|o| o.try_iter_pairs()).into_iter().flatten().collect())
}

/// A view of a dict by Python's method.
pub(crate) fn view(dict: &Value, name: &str) -> Result<Value, Error> {
    let pairs = pairs(dict)?.into_iter();
    let (name, items) = match name {
        "keys" => ("dict_keys", pairs.map(|(k, _)| k).collect()),
        "values" => ("dict_values", pairs.map(|(_, v)| v).collect()),
        _ => ("dict_items", pairs.map(|(k, v)| tuple(vec![k, v])).collect()),
    };
    Ok(Value::from_object(View { name, items }))
}

fn of_dict(object: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    match name {
        "get" => {
            let args = positional(name, args, 1, 2)?;
            check_key(&args[0])?;
            let found = object.as_object().and_then(|o| o.get_value(&args[0]));
            Ok(found.or_else(|| args.get(1).cloned()).unwrap_or(Value::from(())))
        }
        "copy" => {
            positional(name, args, 0, 0)?;
            Ok(object.clone())
        }
        "fromkeys" => {
            let args = positional(name, args, 1, 2)?;
            let value = args.get(1).cloned().unwrap_or(Value::from(()));
            let keys = iterate(&args[0])?;
            keys.iter().try_for_each(|k| check_key(k).and_then(|()| weigh(&value)))?;
            Ok(Value::from_pairs(keys.into_iter().map(|k| (k, value.clone()))))
        }
        _ => {
            positional(name, args, 0, 0)?;
            view(object, name)
        }
    }
}

fn of_number(object: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    positional(name, args, 0, 0)?;
    let n = integer(object);
    Ok(match (name, number::Number::of(object)) {
        ("bit_length", _) => Value::from(n.map_or(0, |n| 128 - n.unsigned_abs().leading_zeros())),
        ("bit_count", _) => Value::from(n.map_or(0, |n| n.unsigned_abs().count_ones())),
        ("is_integer", Some(number::Number::Float(x))) => Value::from(x.fract() == 0.0 && x.is_finite()),
        ("is_integer", _) => Value::from(true),
        ("hex", _) => return Err(invalid("float.hex is not built yet")),
        _ => n.map_or_else(|| object.clone(), from_int),
    })
}
