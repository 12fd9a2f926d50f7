//! The filters, tests and functions of templates, counting what they cost before they are called. What is not in
//! these tables is not there: a filter that a later version of the engine adds is added here first.

use super::bounds::{made, spend, spend_product, weigh};
use super::guard::invalid;
use super::ops::{shallow, spend_replace, spend_split, weigh_text};
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters, functions, tests};
use std::borrow::Cow;

/// Widths and precisions that a format may name.
const WIDEST: usize = 4096;
/// How much more sorting costs than going over what is sorted.
const SORTING: usize = 16;

/// What a filter costs.
#[derive(Clone, Copy, PartialEq)]
enum Cost {
    /// As much as what it looks at first; its result was there before.
    Look,
    /// A pass over its arguments and its result.
    Pass,
    /// As many passes as sorting takes.
    Sort,
    /// A text written of its first argument.
    Text,
    /// A text between all items of its first argument.
    Join,
    /// Characters of one text looked for in another.
    Trim,
    Replace,
    Split,
    Indent,
    Format,
    Batch,
    Sum,
}

fn all_filters() -> Vec<(&'static str, Cost, Value)> {
    use Cost::*;
    macro_rules! table {
        ($($name:literal $cost:ident $f:path),* $(,)?) => {
            vec![$(($name, $cost, Value::from_function($f))),*]
        };
    }
    table![
        "safe" Look filters::safe, "length" Look filters::length, "count" Look filters::length,
        "default" Look filters::default, "d" Look filters::default, "abs" Look filters::abs,
        "round" Look filters::round, "int" Look filters::int, "float" Look filters::float,
        "bool" Look filters::bool, "attr" Look filters::attr, "first" Look filters::first, "last" Look filters::last,
        "escape" Text filters::escape, "e" Text filters::escape, "string" Text filters::string,
        "lower" Pass filters::lower, "upper" Pass filters::upper, "title" Pass filters::title,
        "capitalize" Pass filters::capitalize, "trim" Trim filters::trim, "items" Pass filters::items,
        "reverse" Pass filters::reverse, "list" Pass filters::list, "select" Pass filters::select,
        "reject" Pass filters::reject, "selectattr" Pass filters::selectattr, "rejectattr" Pass filters::rejectattr,
        "map" Pass filters::map, "min" Pass filters::min, "max" Pass filters::max, "zip" Pass filters::zip,
        "chain" Pass chain,
        "dictsort" Sort filters::dictsort, "sort" Sort filters::sort, "groupby" Sort filters::groupby,
        "unique" Sort filters::unique, "pprint" Sort filters::pprint,
        "join" Join filters::join, "replace" Replace filters::replace, "split" Split filters::split,
        "lines" Split filters::lines, "indent" Indent filters::indent, "format" Format filters::format,
        "batch" Batch filters::batch, "slice" Batch filters::slice, "sum" Sum filters::sum,
    ]
}

/// Gives `env` its filters, tests and functions.
pub(super) fn add(env: &mut Environment<'static>) {
    for (name, cost, filter) in all_filters() {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            spend_filter(cost, &args)?;
            let out = filter.call(state, &args)?;
            if cost == Cost::Look { Ok(out) } else { made(out) }
        });
    }
    for name in ["urlencode", "tojson"] {
        env.remove_filter(name);
    }
    macro_rules! compare {
        ($($name:literal $f:path),* $(,)?) => {
            [$(($name, Value::from_function($f))),*]
        };
    }
    for (name, test) in compare![
        "eq" tests::is_eq, "equalto" tests::is_eq, "==" tests::is_eq, "ne" tests::is_ne, "!=" tests::is_ne,
        "lt" tests::is_lt, "lessthan" tests::is_lt, "<" tests::is_lt, "le" tests::is_le, "<=" tests::is_le,
        "gt" tests::is_gt, "greaterthan" tests::is_gt, ">" tests::is_gt, "ge" tests::is_ge, ">=" tests::is_ge,
        "in" tests::is_in, "startingwith" tests::is_startingwith, "endingwith" tests::is_endingwith,
        "lower" tests::is_lower, "upper" tests::is_upper, "sameas" tests::is_sameas, "filter" tests::is_filter,
        "test" tests::is_test,
    ] {
        env.add_test(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            args.iter().try_for_each(weigh)?;
            Ok::<_, Error>(test.call(state, &args)?.is_true())
        });
    }
    env.add_test("iterable", |v: &Value| {
        spend(shallow(v))?;
        Ok::<_, Error>(v.try_iter().is_ok())
    });
    for (name, function) in [
        ("range", Value::from_function(functions::range)),
        ("dict", Value::from_function(functions::dict)),
        ("namespace", Value::from_function(functions::namespace)),
    ] {
        env.add_function(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            args.iter().try_for_each(super::bounds::weigh_data)?;
            let out = function.call(state, &args)?;
            if name == "namespace" { Ok(out) } else { made(out) }
        });
    }
    env.remove_global("debug");
}

fn spend_filter(cost: Cost, args: &[Value]) -> Result<(), Error> {
    let Some((first, rest)) = args.split_first() else { return Ok(()) };
    let text = first.as_str();
    if cost == Cost::Look {
        return spend(shallow(first));
    }
    match (cost, first.as_object()) {
        (Cost::Text | Cost::Join, _) => weigh_text(first)?,
        (Cost::Sort, _) => (0..SORTING).try_for_each(|_| weigh(first))?,
        _ => weigh(first)?,
    }
    rest.iter().try_for_each(weigh)?;
    // a name of an attribute, or what stands between items, is gone over for each of them
    let named: usize = rest.iter().map(text_bytes).sum();
    match text {
        None => spend_product(first.len().unwrap_or(0), named)?,
        // a text as a sequence of its characters, or each of its characters looked for among others
        Some(t) if cost == Cost::Pass || cost == Cost::Sort => spend_product(t.len(), 8 + named / 4)?,
        Some(_) => {}
    }
    let by_name = |name: &str| Kwargs::try_from(rest.last()?.clone()).ok()?.get::<Value>(name).ok();
    let arg = |i: usize| rest.get(i).filter(|v| !v.is_kwargs());
    let number =
        |i: usize, name: &str| arg(i).and_then(Value::as_usize).or_else(|| by_name(name)?.as_usize());
    match cost {
        Cost::Join => {
            let between = arg(0).cloned().or_else(|| by_name("d"));
            let items = first.len().or_else(|| Some(first.try_iter().ok()?.count()));
            spend_product(items.unwrap_or(0), written(between.as_ref())?.len())
        }
        Cost::Trim => spend_product(written(Some(first))?.len(), written(arg(0))?.len() / 4),
        Cost::Replace => spend_replace(&written(Some(first))?, &written(arg(0))?, &written(arg(1))?),
        Cost::Split => spend_split(text.unwrap_or_default(), arg(0).and_then(Value::as_str)),
        Cost::Indent => {
            let lines = written(Some(first))?.matches('\n').count() + 1;
            spend_product(lines, number(0, "width").unwrap_or(4))
        }
        Cost::Format => check_widths(&written(Some(first))?, rest),
        Cost::Batch => spend_product(number(0, "count").unwrap_or(0).min(1 << 40), 64),
        Cost::Sum => {
            let start = rest.get(1).cloned().or_else(|| by_name("start"));
            match start.filter(|s| s.kind() != ValueKind::Number && !s.is_none()) {
                Some(other) => Err(invalid(format!("sum is of numbers, and start is a {}", other.kind()))),
                None => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

/// Bytes of the texts in an argument, keyword arguments among them.
fn text_bytes(v: &Value) -> usize {
    if let Some(s) = v.as_str() {
        return s.len();
    }
    if !v.is_kwargs() {
        return 0;
    }
    let pairs = v.as_object().and_then(|o| o.try_iter_pairs());
    pairs.into_iter().flatten().map(|(_, v)| v.as_str().map_or(0, str::len)).sum()
}

/// An argument as the engine makes a text of it where it wants one: whatever it is, it is written.
fn written(v: Option<&Value>) -> Result<Cow<'_, str>, Error> {
    let Some(v) = v else { return Ok(Cow::Borrowed("")) };
    match v.as_str() {
        Some(text) => Ok(Cow::Borrowed(text)),
        None => weigh_text(v).map(|()| Cow::Owned(v.to_string())),
    }
}

/// Spends what a format writes, and refuses widths that nobody means.
pub(super) fn check_widths(format: &str, args: &[Value]) -> Result<(), Error> {
    let wide = |n: usize| invalid(format!("a format asks for {n} characters; at most {WIDEST}"));
    for digits in format.split(|c: char| !c.is_ascii_digit()).filter(|d| !d.is_empty()) {
        let n = digits.parse().unwrap_or(usize::MAX);
        if n > WIDEST {
            return Err(wide(n));
        }
        spend(n)?;
    }
    // widths that are arguments themselves
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

/// Lists end to end, or maps over each other; the engine's own stays a chain.
fn chain(first: Value, others: Rest<Value>) -> Result<Value, Error> {
    let all: Vec<Value> = std::iter::once(first).chain(others.0).collect();
    if all.iter().all(|v| v.kind() == ValueKind::Map) {
        let objects = all.iter().filter_map(Value::as_object);
        return Ok(Value::from_pairs(objects.filter_map(|o| o.try_iter_pairs()).flatten()));
    }
    let mut out = Vec::new();
    for v in &all {
        for item in v.try_iter()?.checked() {
            spend(32)?;
            out.push(item?);
        }
    }
    Ok(Value::from(out))
}
