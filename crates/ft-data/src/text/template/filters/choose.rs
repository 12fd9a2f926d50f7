//! Filters that call other filters and tests by name.

use super::Calling;
use super::sequence::lookup;
use crate::text::template::python::access::iterate;
use crate::text::template::python::kind::{Generator, invalid};
use crate::text::template::python::methods::pairs;
use minijinja::{Error, State, Value};

/// Names and functions of the filters.
pub(super) const FILTERS: &[(&str, Calling)] = &[
    ("map", map),
    ("select", |state, v, args| choose(state, v, args, false, true)),
    ("reject", |state, v, args| choose(state, v, args, false, false)),
    ("selectattr", |state, v, args| choose(state, v, args, true, true)),
    ("rejectattr", |state, v, args| choose(state, v, args, true, false)),
    ("format", |_, v, args| super::text::format(v, args)),
];

/// A lazy map and filter of the items by `f`. Errors surface during iteration.
fn each(v: &Value, mut f: impl FnMut(Value) -> Result<Option<Value>, Error>) -> Result<Value, Error> {
    if !v.is_true() {
        return Ok(Generator::value(std::iter::empty()));
    }
    let items = match iterate(v) {
        Ok(items) => items,
        Err(e) => return Ok(Generator::failed(e)),
    };
    Ok(Generator::value(items.into_iter().filter_map(|one| f(one).transpose())))
}

fn map(state: &mut State<'_, '_>, v: &Value, args: &[Value]) -> Result<Value, Error> {
    let keywords = args.last().filter(|a| a.is_kwargs()).map_or(Ok(Vec::new()), pairs)?;
    let keyword = |name: &str| keywords.iter().find(|(k, _)| k.as_str() == Some(name)).map(|(_, v)| v);
    match (args.split_first(), keyword("attribute")) {
        (Some((name, _)), Some(path)) if name.is_kwargs() => {
            if let Some((other, _)) =
                keywords.iter().find(|(k, _)| !matches!(k.as_str(), Some("attribute" | "default")))
            {
                return each(v, |_| Err(invalid(format!("Unexpected keyword argument '{other}'"))));
            }
            each(v, |one| lookup(&one, path, keyword("default").filter(|d| !d.is_none())).map(Some))
        }
        (Some((name, rest)), _) if !name.is_kwargs() => {
            let name = name.as_str().unwrap_or_default().to_string();
            each(v, |one| {
                let all: Vec<Value> = std::iter::once(one).chain(rest.iter().cloned()).collect();
                state.apply_filter(&name, &all).map(Some)
            })
        }
        _ => each(v, |_| Err(invalid("map requires a filter argument"))),
    }
}

fn choose(
    state: &mut State<'_, '_>,
    v: &Value,
    args: &[Value],
    by_attribute: bool,
    wanted: bool,
) -> Result<Value, Error> {
    let (path, args) = match args.split_first() {
        Some((path, rest)) if by_attribute && !path.is_kwargs() => (Some(path), rest),
        _ if by_attribute => return each(v, |_| Err(invalid("Missing parameter for attribute name"))),
        _ => (None, args),
    };
    each(v, |one| {
        let tested = path.map_or_else(|| Ok(one.clone()), |path| lookup(&one, path, None))?;
        let holds = match args.split_first() {
            Some((name, rest)) if !name.is_kwargs() => {
                let all: Vec<Value> = std::iter::once(tested).chain(rest.iter().cloned()).collect();
                state.perform_test(name.as_str().unwrap_or_default(), &all)?
            }
            _ => tested.is_true(),
        };
        Ok((holds == wanted).then_some(one))
    })
}
