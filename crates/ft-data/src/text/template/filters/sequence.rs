//! Filters of lists and dicts.

use super::{Arguments, Named};
use crate::text::template::bounds::{spend, spend_product, weigh};
use crate::text::template::python::access::{item, iterate, slice};
use crate::text::template::python::compare::{self, check_key, equal, order};
use crate::text::template::python::kind::{Generator, Group, Kind, invalid, text_value};
use crate::text::template::python::methods;
use crate::text::template::python::number::add;
use crate::text::template::python::text::text;
use minijinja::{Error, Value};
use std::cmp::Ordering;

/// Names, parameters, and the function of each filter.
pub(super) const FILTERS: &[(&[&str], &[&str], Named)] = &[
    (&["list"], &[], |v, _| iterate(v).map(Value::from)),
    (&["first"], &[], |v, _| first(v)),
    (&["last"], &[], |v, _| Ok(reversed(v)?.into_iter().next().unwrap_or_default())),
    (&["reverse"], &[], reverse),
    (&["join"], &["d", "attribute"], join),
    (&["items"], &[], |v, _| match Kind::of(v) {
        Kind::Undefined => Ok(Generator::value(std::iter::empty())),
        Kind::Dict => Ok(Generator::value(iterate(&methods::view(v, "items")?)?.into_iter().map(Ok))),
        _ => Ok(Generator::failed(invalid("Can only get item pairs from a mapping."))),
    }),
    (&["dictsort"], &["case_sensitive", "by", "reverse"], dictsort),
    (&["sort"], &["reverse", "case_sensitive", "attribute"], sort),
    (&["unique"], &["case_sensitive", "attribute"], unique),
    (&["min"], &["case_sensitive", "attribute"], |v, a| extreme(v, a, Ordering::Less)),
    (&["max"], &["case_sensitive", "attribute"], |v, a| extreme(v, a, Ordering::Greater)),
    (&["sum"], &["attribute", "start"], sum),
    (&["groupby"], &["attribute", "default", "case_sensitive"], groupby),
    (&["batch"], &["linecount", "fill_with"], batch),
    (&["slice"], &["slices", "fill_with"], slices),
];

fn first(v: &Value) -> Result<Value, Error> {
    if Kind::of(v) == Kind::Generator {
        return v.try_iter()?.checked().next().unwrap_or(Ok(Value::UNDEFINED));
    }
    Ok(iterate(v)?.into_iter().next().unwrap_or_default())
}

/// The items from the end.
fn reversed(v: &Value) -> Result<Vec<Value>, Error> {
    if Kind::of(v) == Kind::Generator {
        return Err(invalid(format!("'{}' object is not reversible", Kind::of(v).name())));
    }
    let mut items = iterate(v)?;
    items.reverse();
    Ok(items)
}

fn reverse(v: &Value, _: &Arguments) -> Result<Value, Error> {
    match Kind::of(v) {
        Kind::Str => slice(v, &Value::from(()), &Value::from(()), &Value::from(-1)),
        Kind::Generator => {
            let mut items = iterate(v)?;
            items.reverse();
            Ok(Value::from(items))
        }
        _ => Ok(Generator::value(reversed(v)?.into_iter().map(Ok))),
    }
}

fn join(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let between = a.get(0).map_or(Ok("".into()), text)?;
    let mut out = String::new();
    for (i, one) in iterate(v)?.iter().enumerate() {
        let one = attribute_or_self(one, a, 1)?;
        let piece = text(&one)?;
        spend(between.len() + piece.len())?;
        out.push_str(if i > 0 { &between } else { "" });
        out.push_str(&piece);
    }
    Ok(Value::from(out))
}

/// The attribute that argument `i` names, else the value itself.
fn attribute_or_self(v: &Value, a: &Arguments, i: usize) -> Result<Value, Error> {
    a.some(i).map_or_else(|| Ok(v.clone()), |path| lookup(v, path, None))
}

/// The attribute of a dotted path; digits are numbers.
pub(super) fn lookup(v: &Value, path: &Value, default: Option<&Value>) -> Result<Value, Error> {
    let Some(dotted) = path.as_str() else {
        return if path.is_none() { Ok(v.clone()) } else { or(item(v, path)?, default) };
    };
    spend(dotted.len())?;
    let mut v = v.clone();
    for part in dotted.split('.') {
        let digits = !part.is_empty() && part.chars().all(|c| c.is_ascii_digit());
        let key = part.parse::<i64>().ok().filter(|_| digits).map_or_else(|| Value::from(part), Value::from);
        v = or(item(&v, &key)?, default)?;
    }
    Ok(v)
}

fn or(v: Value, default: Option<&Value>) -> Result<Value, Error> {
    Ok(default.filter(|_| v.is_undefined()).cloned().unwrap_or(v))
}

/// The key by which an item is compared: without case unless asked.
fn key(v: Value, sensitive: bool) -> Result<Value, Error> {
    match v.as_str().filter(|_| !sensitive) {
        Some(s) => {
            spend(s.len())?;
            Ok(text_value(s.to_lowercase(), v.is_safe()))
        }
        None => Ok(v),
    }
}

/// Pairs of key and value, sorted by keys.
fn sorted(mut items: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<(Value, Value)>, Error> {
    spend_product(items.len(), 64)?;
    compare::sort(&mut items, reverse, |(key, _)| key)?;
    Ok(items)
}

fn second(items: Vec<(Value, Value)>) -> Value {
    items.into_iter().map(|(_, v)| v).collect::<Vec<_>>().into()
}

fn dictsort(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let by = match a.get(1).map_or(Some("key"), Value::as_str) {
        Some("key") => 0,
        Some("value") => 1,
        _ => return Err(invalid("You can only sort by either \"key\" or \"value\"")),
    };
    if Kind::of(v) != Kind::Dict {
        return Err(invalid("dictsort wants a dict"));
    }
    let mut items = Vec::new();
    for pair in iterate(&methods::view(v, "items")?)? {
        let by = item(&pair, &Value::from(by))?;
        items.push((key(by, a.is_true(0))?, pair));
    }
    Ok(second(sorted(items, a.is_true(2))?))
}

fn sort(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let paths: Vec<Value> = match a.some(2) {
        None => vec![Value::from(())],
        Some(v) => match v.as_str() {
            Some(s) => s.split(',').map(Value::from).collect(),
            None => vec![v.clone()],
        },
    };
    let mut items = Vec::new();
    for one in iterate(v)? {
        let keys = paths.iter().map(|path| key(lookup(&one, path, None)?, a.is_true(1)));
        items.push((Value::from(keys.collect::<Result<Vec<_>, _>>()?), one));
    }
    Ok(second(sorted(items, a.is_true(0))?))
}

fn unique(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let mut seen: Vec<Value> = Vec::new();
    let mut out = Vec::new();
    let items = match iterate(v) {
        Ok(items) => items,
        Err(e) => return Ok(Generator::failed(e)),
    };
    for one in items {
        let found = attribute_or_self(&one, a, 1).and_then(|found| {
            let key = key(found, a.is_true(0))?;
            check_key(&key)?;
            for other in &seen {
                if equal(other, &key)? {
                    return Ok(None);
                }
            }
            Ok(Some(key))
        });
        match found {
            Ok(None) => {}
            Ok(Some(key)) => {
                seen.push(key);
                out.push(Ok(one));
            }
            Err(e) => {
                out.push(Err(e));
                break;
            }
        }
    }
    Ok(Generator::value(out.into_iter()))
}

fn extreme(v: &Value, a: &Arguments, wanted: Ordering) -> Result<Value, Error> {
    let mut best: Option<(Value, Value)> = None;
    for one in iterate(v)? {
        let key = key(attribute_or_self(&one, a, 1)?, a.is_true(0))?;
        let better = match &best {
            None => true,
            Some((other, _)) => order(&key, other)? == Some(wanted),
        };
        if better {
            best = Some((key, one));
        }
    }
    Ok(best.map(|b| b.1).unwrap_or_default())
}

fn sum(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let mut total = a.get(1).cloned().unwrap_or(Value::from(0));
    if Kind::of(&total) == Kind::Str {
        return Err(invalid("sum() can't sum strings [use ''.join(seq) instead]"));
    }
    for one in iterate(v)? {
        total = add(&total, &attribute_or_self(&one, a, 0)?)?;
    }
    Ok(total)
}

fn groupby(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let (path, sensitive) = (a.needed(0)?, a.is_true(2));
    let mut items = Vec::new();
    for one in iterate(v)? {
        items.push((key(lookup(&one, path, a.some(1))?, sensitive)?, one));
    }
    let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
    for (key, one) in sorted(items, false)? {
        match groups.last_mut() {
            Some((other, list)) if equal(other, &key)? => list.push(one),
            _ => groups.push((key, vec![one])),
        }
    }
    let mut out = Vec::new();
    for (key, list) in groups {
        let grouper = if sensitive { key } else { lookup(&list[0], path, a.some(1))? };
        out.push(Value::from_object(Group { grouper, list: Value::from(list) }));
    }
    Ok(Value::from(out))
}

fn batch(v: &Value, a: &Arguments) -> Result<Value, Error> {
    let size = a.int(0, 0)?;
    a.needed(0)?;
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    let mut out: Vec<Vec<Value>> = Vec::new();
    let items = match iterate(v) {
        Ok(items) => items,
        Err(e) => return Ok(Generator::failed(e)),
    };
    for one in items {
        match out.last_mut() {
            Some(last) if last.len() != size => last.push(one),
            _ => out.push(vec![one]),
        }
    }
    // a batch of no items comes first when the count is zero
    if size == 0 && !out.is_empty() {
        out.insert(0, Vec::new());
    }
    if let (Some(fill), Some(last)) = (a.some(1), out.last_mut())
        && last.len() < size
    {
        spend_product(size - last.len(), 64)?;
        weigh(fill)?;
        last.resize(size, fill.clone());
    }
    Ok(Generator::value(out.into_iter().map(|b| Ok(Value::from(b)))))
}

fn slices(v: &Value, a: &Arguments) -> Result<Value, Error> {
    a.needed(0)?;
    let count = a.int(0, 0)?;
    let items = match iterate(v) {
        Ok(items) if count != 0 => items,
        failed => {
            let zero = || invalid("integer division or modulo by zero");
            return Ok(Generator::failed(failed.err().unwrap_or_else(zero)));
        }
    };
    let count = usize::try_from(count).unwrap_or(0);
    spend_product(count, 64)?;
    let (each, more) = items.len().checked_div(count).map_or((0, 0), |each| (each, items.len() % count));
    let mut from = 0;
    let mut out = Vec::new();
    for i in 0..count {
        let to = from + each + usize::from(i < more);
        let mut part = items[from..to].to_vec();
        if let Some(fill) = a.some(1).filter(|_| i >= more) {
            part.push(fill.clone());
        }
        out.push(Ok(Value::from(part)));
        from = to;
    }
    Ok(Generator::value(out.into_iter()))
}
