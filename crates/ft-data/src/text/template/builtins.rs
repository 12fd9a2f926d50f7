//! Allow-list of template filters, tests and functions; all spend costs before the call. Filters added by
//! later versions of the engine are unavailable until listed here.

use super::bounds::{made, spend, spend_product, weigh, weigh_data};
use super::costs::{check_widths, invalid, shallow, spend_replace, spend_split, weigh_text};
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters, functions, tests};
use std::borrow::Cow;

/// Cost factor of sorting, relative to one traversal.
const SORTING: usize = 16;

/// Cost model of a filter.
#[derive(Clone, Copy, PartialEq)]
enum Cost {
    /// Shallow access to the first argument; returns an existing value.
    Look,
    /// One traversal of arguments and result.
    Pass,
    /// Several traversals, for sorting.
    Sort,
    /// Formats the first argument as text.
    Text,
    /// Inserts a separator between the items of the first argument.
    Join,
    /// Searches the characters of one text in another.
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

/// Registers filters, tests and functions in `env`.
pub(crate) fn add(env: &mut Environment<'static>) {
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
            args.iter().try_for_each(weigh_data)?;
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
    // attribute names and separators are read once per item
    let named: usize = rest.iter().map(text_bytes).sum();
    match text {
        None => spend_product(first.len().unwrap_or(0), named)?,
        // a text as a sequence of characters, or a search for every character in another text
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

/// Bytes of text in an argument, including keyword arguments.
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

/// Converts an argument to text, as the engine does for string parameters.
fn written(v: Option<&Value>) -> Result<Cow<'_, str>, Error> {
    let Some(v) = v else { return Ok(Cow::Borrowed("")) };
    match v.as_str() {
        Some(text) => Ok(Cow::Borrowed(text)),
        None => weigh_text(v).map(|()| Cow::Owned(v.to_string())),
    }
}

/// Concatenates lists, or merges maps. Unlike the engine's lazy version, returns a list.
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
