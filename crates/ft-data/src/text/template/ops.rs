//! Operators and methods of templates that spend costs before execution. Results equal those of the engine,
//! except that lazy sequences become lists.

use super::bounds::{made, spend, spend_product, tick, weigh, weigh_data};
use super::costs::{check_widths, invalid, shallow, spend_replace, spend_split, weigh_text};
use minijinja::value::{Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, State, Value, escape_formatter};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Registers the filters called by guarded instructions.
pub(crate) fn add(env: &mut Environment<'static>) {
    env.add_filter("ft_add", add_values);
    env.add_filter("ft_mul", multiply);
    env.add_filter("ft_concat", |a: &Value, b: &Value| {
        weigh_text(a)?;
        weigh_text(b)?;
        Ok::<_, Error>(Value::from(format!("{a}{b}")))
    });
    env.add_filter("ft_slice", slice);
    env.add_filter("ft_eq", |a: &Value, b: &Value| both(a, b).map(|()| a == b));
    env.add_filter("ft_ne", |a: &Value, b: &Value| both(a, b).map(|()| a != b));
    env.add_filter("ft_lt", |a: &Value, b: &Value| both(a, b).map(|()| a < b));
    env.add_filter("ft_lte", |a: &Value, b: &Value| both(a, b).map(|()| a <= b));
    env.add_filter("ft_gt", |a: &Value, b: &Value| both(a, b).map(|()| a > b));
    env.add_filter("ft_gte", |a: &Value, b: &Value| both(a, b).map(|()| a >= b));
    env.add_filter("ft_in", contains);
    env.add_filter("ft_item", item);
    env.add_filter("ft_list", |items: Rest<Value>| all(&items).map(|()| Value::from(items.0)));
    env.add_filter("ft_tuple", |items: Rest<Value>| all(&items).map(|()| Value::from(Tuple::from(items.0))));
    env.add_filter("ft_map", |items: Rest<Value>| {
        all(&items)?;
        let pairs = items.chunks_exact(2).map(|p| (p[0].clone(), p[1].clone()));
        Ok::<_, Error>(Value::from_pairs(pairs))
    });
    env.add_filter("ft_weigh", |v: &Value| weigh(v).map(|()| v.clone()));
    env.add_filter("ft_data", |v: &Value| weigh_data(v).map(|()| v.clone()));
    env.add_filter("ft_iter", |v: &Value| {
        spend(shallow(v))?;
        Ok::<_, Error>(v.clone())
    });
    env.add_filter("ft_tick", |_: &Value| tick());
    env.add_filter("ft_closure", |_: &Value| spend(1 << 10));
    env.set_formatter(|out, state, value| {
        weigh_text(value)?;
        match value.as_str().filter(|_| matches!(state.auto_escape(), AutoEscape::None)) {
            Some(text) => out.write_str(text).map_err(Error::from),
            None => escape_formatter(out, state, value),
        }
    });
    env.set_unknown_method_callback(|state, value, name, args| match (value.as_str(), args) {
        (Some(text), [arg]) if arg.as_str().is_some_and(|a| !a.is_empty()) => {
            match string_method(text, name, arg.as_str().unwrap_or_default()) {
                Some(out) => Ok(out),
                None => unknown_method_callback(state, value, name, args),
            }
        }
        _ => unknown_method_callback(state, value, name, args),
    });
}

fn all(values: &[Value]) -> Result<(), Error> {
    values.iter().try_for_each(weigh)
}

/// Spends the cost of a comparison.
fn both(a: &Value, b: &Value) -> Result<(), Error> {
    match (a.as_str(), b.as_str()) {
        (Some(a), Some(b)) => spend(a.len().min(b.len())),
        _ => weigh(a).and_then(|()| weigh(b)),
    }
}

fn is_sequence(v: &Value) -> bool {
    matches!(v.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn impossible(op: &str, a: &Value, b: &Value) -> Error {
    invalid(format!("tried to use {op} operator on unsupported types {} and {}", a.kind(), b.kind()))
}

fn add_values(a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(x), Some(y)) = (a.as_str(), b.as_str()) {
        spend(x.len() + y.len())?;
        return Ok(Value::from([x, y].concat()));
    }
    if is_sequence(a) && is_sequence(b) && a.is_tuple() == b.is_tuple() {
        let mut out = Vec::new();
        for v in a.try_iter()?.checked().chain(b.try_iter()?.checked()) {
            let v = v?;
            weigh(&v)?;
            out.push(v);
        }
        return Ok(if a.is_tuple() { Value::from(Tuple::from(out)) } else { Value::from(out) });
    }
    numbers("+", a, b, i128::checked_add, |x, y| x + y)
}

fn multiply(a: &Value, b: &Value) -> Result<Value, Error> {
    let what = if a.as_str().is_some() || is_sequence(a) { Some((a, b)) } else { Some((b, a)) };
    match what.filter(|(v, _)| v.as_str().is_some() || is_sequence(v)) {
        None => numbers("*", a, b, i128::checked_mul, |x, y| x * y),
        Some((text, n)) if text.as_str().is_some() => {
            let n = n.as_usize().ok_or_else(|| invalid("strings can only be multiplied with integers"))?;
            let text = text.as_str().unwrap_or_default();
            spend_product(text.len(), n)?;
            Ok(Value::from(text.repeat(n)))
        }
        Some((list, n)) => {
            let n = n
                .as_usize()
                .ok_or_else(|| invalid("sequences and iterables can only be multiplied with integers"))?;
            let items: Vec<Value> = list.try_iter()?.checked().collect::<Result<_, _>>()?;
            let mut out = Vec::new();
            for _ in 0..if items.is_empty() { 0 } else { n } {
                all(&items)?;
                out.extend_from_slice(&items);
            }
            Ok(if list.is_tuple() { Value::from(Tuple::from(out)) } else { Value::from(out) })
        }
    }
}

/// Arithmetic with the engine's rules: integers stay integers.
fn numbers(
    op: &str,
    a: &Value,
    b: &Value,
    whole: fn(i128, i128) -> Option<i128>,
    real: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let is_real = |v: &Value| v.is_number() && !v.is_integer();
    let fails = || impossible(op, a, b);
    if is_real(a) || is_real(b) {
        let get = |v: &Value| f64::try_from(v.clone()).map_err(|_| fails());
        return Ok(Value::from(real(get(a)?, get(b)?)));
    }
    let get = |v: &Value| i128::try_from(v.clone()).map_err(|_| fails());
    let n = whole(get(a)?, get(b)?).ok_or_else(|| invalid(format!("unable to calculate {a} {op} {b}")))?;
    Ok(i64::try_from(n).map_or_else(|_| Value::from(n), Value::from))
}

/// `value[start:stop:step]` with Python semantics.
fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    let bound = |v: &Value| if v.is_none() { Ok(None) } else { i64::try_from(v.clone()).map(Some) };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(invalid("cannot slice by step size of 0"));
    }
    if let Some(text) = value.as_str() {
        spend(text.len().saturating_mul(4))?;
        let chars: Vec<char> = text.chars().collect();
        return Ok(Value::from(
            indices(start, stop, step, chars.len()).map(|i| chars[i]).collect::<String>(),
        ));
    }
    if let Some(bytes) = value.as_bytes() {
        spend(bytes.len())?;
        let out: Vec<u8> = indices(start, stop, step, bytes.len()).map(|i| bytes[i]).collect();
        return Ok(Value::from_bytes(out));
    }
    if value.is_undefined() || value.is_none() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    if !is_sequence(value) {
        return Err(invalid(format!("value of type {} cannot be sliced", value.kind())));
    }
    spend(shallow(value).saturating_mul(4))?;
    let mut items = Vec::new();
    for v in value.try_iter()?.checked() {
        spend(32)?;
        items.push(v?);
    }
    let out: Vec<Value> = indices(start, stop, step, items.len()).map(|i| items[i].clone()).collect();
    Ok(if value.is_tuple() { Value::from(Tuple::from(out)) } else { Value::from(out) })
}

/// The indices of a slice of `len` items.
fn indices(start: Option<i64>, stop: Option<i64>, step: i64, len: usize) -> Box<dyn Iterator<Item = usize>> {
    let len = i64::try_from(len).unwrap_or(i64::MAX);
    let from_end = |i: i64| if i < 0 { i.saturating_add(len) } else { i };
    if step > 0 {
        let start = start.map_or(0, from_end).clamp(0, len);
        let stop = stop.map_or(len, from_end).clamp(0, len);
        let step = usize::try_from(step).unwrap_or(usize::MAX);
        return Box::new((start..stop).step_by(step).map(|i| i as usize));
    }
    let start = start.map_or(len - 1, from_end).min(len - 1);
    let stop = stop.map_or(-1, |s| from_end(s).max(-1));
    let step = usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX);
    Box::new((stop + 1..=start).rev().step_by(step).map(|i| i as usize))
}

fn contains(value: &Value, container: &Value) -> Result<bool, Error> {
    if container.is_undefined() {
        return Ok(false);
    }
    weigh(value)?;
    if let Some(text) = container.as_str() {
        spend(text.len())?;
        return match value.as_str() {
            Some(part) => Ok(text.contains(part)),
            None => weigh_text(value).map(|()| text.contains(&value.to_string())),
        };
    }
    match container.kind() {
        ValueKind::Map => Ok(container.as_object().is_some_and(|o| o.get_value(value).is_some())),
        ValueKind::Seq | ValueKind::Iterable => {
            for v in container.try_iter()?.checked() {
                let v = v?;
                both(&v, value)?;
                if v == *value {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        _ if container.as_object().is_some() => Ok(false),
        _ => Err(invalid("cannot perform a containment check on this value")),
    }
}

fn item(container: &Value, key: &Value) -> Result<Value, Error> {
    weigh(key)?;
    if key.as_str().is_none() {
        spend(container.as_str().map_or(0, str::len))?;
    }
    container.get_item(key)
}

/// Registers method `name` as a filter, and returns the filter name.
pub(super) fn add_method(env: &mut Environment<'static>, name: &'static str) -> &'static str {
    // template sources, and thus the method names in them, live as long as the process
    let filter: &'static str = Box::leak(format!("ft_method_{name}").into_boxed_str());
    env.add_filter(filter, move |state: &mut State, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        let Some((object, rest)) = args.split_first() else { return Err(invalid("a method of nothing")) };
        method(state, object, name, rest)
    });
    filter
}

fn method(state: &mut State, object: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    all(args)?;
    let text = object.as_str();
    let arg = |i: usize| args.get(i).and_then(Value::as_str);
    match (text, name) {
        (None, "get") => {}
        (None, _) => weigh(object)?,
        (Some(_), "startswith" | "endswith" | "removeprefix" | "removesuffix") => {}
        (Some(text), "replace") => {
            spend_replace(text, arg(0).unwrap_or_default(), arg(1).unwrap_or_default())?
        }
        (Some(text), "split" | "splitlines") => spend_split(text, arg(0))?,
        (Some(text), "join") => {
            spend_product(text.len(), args.first().and_then(Value::len).unwrap_or(0))?;
            args.first().map_or(Ok(()), weigh_text)?;
        }
        (Some(text), "format") => check_widths(text, args)?,
        (Some(text), "strip" | "lstrip" | "rstrip" | "count") => {
            let set = arg(0).map_or(0, str::len);
            spend(text.len())?;
            // strip compares every character of the text with the set
            if name != "count" {
                spend_product(text.len(), set / 4)?
            }
        }
        (Some(text), _) => spend(text.len())?,
    }
    let out = object.call_method(state, name, args)?;
    if text.is_none() && name == "get" { Ok(out) } else { made(out) }
}

/// Python string methods with one argument that are missing in pycompat.
fn string_method(text: &str, name: &str, arg: &str) -> Option<Value> {
    Some(match name {
        "removeprefix" => text.strip_prefix(arg).unwrap_or(text).into(),
        "removesuffix" => text.strip_suffix(arg).unwrap_or(text).into(),
        "partition" => {
            let (a, b) = text.split_once(arg).map_or((text, None), |(a, b)| (a, Some(b)));
            [a, if b.is_some() { arg } else { "" }, b.unwrap_or_default()].into_iter().collect()
        }
        "rpartition" => {
            let (a, b) = text.rsplit_once(arg).map_or((None, text), |(a, b)| (Some(a), b));
            [a.unwrap_or_default(), if a.is_some() { arg } else { "" }, b].into_iter().collect()
        }
        _ => return None,
    })
}
