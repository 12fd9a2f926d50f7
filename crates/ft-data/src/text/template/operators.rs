//! Operators with Python's semantics, as filters called by rewritten instructions ([`super::guard`]).

use super::bounds::{spend, tick, weigh, weigh_data};
use super::python::access::{attribute, item, iterate, length, slice};
use super::python::compare::{check_key, holds};
use super::python::kind::{Kind, invalid, tuple};
use super::python::text::{escaped, text};
use super::python::{methods, number};
use minijinja::value::{Kwargs, Rest, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, State, Value};

/// Registers the operators.
pub(super) fn add(env: &mut Environment<'static>) {
    env.add_filter("ft_add", number::add);
    env.add_filter("ft_sub", number::subtract);
    env.add_filter("ft_mul", number::multiply);
    env.add_filter("ft_div", number::divide);
    env.add_filter("ft_floor", number::floor_divide);
    env.add_filter("ft_rem", number::remainder);
    env.add_filter("ft_pow", number::power);
    env.add_filter("ft_neg", number::negate);
    env.add_filter("ft_concat", |a: &Value, b: &Value| {
        Ok::<_, Error>(Value::from([text(a)?, text(b)?].concat()))
    });
    env.add_filter("ft_slice", slice);
    env.add_filter("ft_eq", |a: &Value, b: &Value| holds("Eq", a, b));
    env.add_filter("ft_ne", |a: &Value, b: &Value| holds("Ne", a, b));
    env.add_filter("ft_lt", |a: &Value, b: &Value| holds("Lt", a, b));
    env.add_filter("ft_lte", |a: &Value, b: &Value| holds("Lte", a, b));
    env.add_filter("ft_gt", |a: &Value, b: &Value| holds("Gt", a, b));
    env.add_filter("ft_gte", |a: &Value, b: &Value| holds("Gte", a, b));
    env.add_filter("ft_in", |a: &Value, b: &Value| holds("In", a, b));
    env.add_filter("ft_item", item);
    env.add_filter("ft_attr", |object: &Value, name: &Value| {
        attribute(object, name.as_str().unwrap_or_default())
    });
    env.add_filter("ft_same", |v: &Value| v.clone());
    // the last item may hold the keywords of a call
    env.add_filter("ft_list", |items: Rest<ValueOrKwargs>| {
        let items = items.into_values();
        all(&items).map(|()| Value::from(items))
    });
    env.add_filter("ft_arguments", |lists: Rest<Value>| {
        let lists = lists.iter().map(iterate).collect::<Result<Vec<_>, _>>()?;
        Ok::<_, Error>(Value::from(lists.concat()))
    });
    env.add_filter("ft_keywords", |maps: Rest<ValueOrKwargs>| keywords(&maps.into_values()));
    env.add_filter("ft_tuple", |items: Rest<Value>| all(&items).map(|()| tuple(items.0)));
    env.add_filter("ft_map", |items: Rest<Value>| {
        all(&items)?;
        items.iter().step_by(2).try_for_each(check_key)?;
        let pairs = items.chunks_exact(2).map(|p| (p[0].clone(), p[1].clone()));
        Ok::<_, Error>(Value::from_pairs(pairs))
    });
    // a comparison in a chain, with its second operand
    env.add_filter("ft_compare", |a: &Value, b: &Value, op: &str| {
        Ok::<_, Error>(tuple(vec![holds(op, a, b)?.into(), b.clone()]))
    });
    env.add_filter("ft_data", |v: &Value| weigh_data(v).map(|()| v.clone()));
    env.add_filter("ft_iter", looped);
    env.add_filter("ft_unpack", |v: &Value| match Kind::of(v) {
        Kind::Str => iterate(v).map(Value::from),
        _ => Ok(v.clone()),
    });
    env.add_filter("ft_tick", |_: &Value| tick());
    env.add_filter("ft_closure", |_: &Value| spend(1 << 10));
    env.set_formatter(|out, state, value| {
        let text = match state.auto_escape() {
            AutoEscape::None => text(value)?,
            _ => escaped(value)?.into(),
        };
        out.write_str(&text).map_err(Error::from)
    });
}

fn all(values: &[Value]) -> Result<(), Error> {
    values.iter().try_for_each(weigh)
}

/// The keyword arguments of a call, from names with values and a `**map`.
fn keywords(maps: &[Value]) -> Result<Value, Error> {
    let mut all: Vec<(String, Value)> = Vec::new();
    for map in maps {
        if !map.is_kwargs() && Kind::of(map) != Kind::Dict {
            let kind = Kind::of(map).name();
            return Err(invalid(format!("argument after ** must be a mapping, not {kind}")));
        }
        for (key, value) in methods::pairs(map)? {
            let name = key.as_str().ok_or_else(|| invalid("keywords must be strings"))?;
            if all.iter().any(|(known, _)| known == name) {
                return Err(invalid(format!("got multiple values for keyword argument '{name}'")));
            }
            all.push((name.into(), value));
        }
    }
    Ok(Value::from(all.into_iter().collect::<Kwargs>()))
}

/// A value as the items of a loop.
fn looped(v: &Value) -> Result<Value, Error> {
    match Kind::of(v) {
        Kind::Generator | Kind::Undefined => Ok(v.clone()),
        Kind::Str => iterate(v).map(Value::from),
        kind => match length(v) {
            Ok(n) => spend(8 * n).map(|()| v.clone()),
            Err(_) => Err(invalid(format!("'{}' object is not iterable", kind.name()))),
        },
    }
}

/// Registers method `name` as a filter, and returns the filter name.
pub(super) fn add_method(env: &mut Environment<'static>, name: &'static str) -> &'static str {
    // template sources, and thus the method names in them, live as long as the process
    let filter: &'static str = Box::leak(format!("ft_method_{name}").into_boxed_str());
    env.add_filter(filter, move |state: &mut State, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        let Some((object, rest)) = args.split_first() else { return Err(invalid("a method of nothing")) };
        methods::call(state, object, name, rest)
    });
    filter
}
