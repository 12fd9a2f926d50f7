//! Filters of Jinja2, by name. Filters of the engine beyond those are refused, as Jinja2 refuses them.

mod choose;
mod sequence;
mod text;

use super::bounds::weigh;
use super::python::kind::{Kind, integer, invalid};
use super::python::methods::{bind, given};
use minijinja::value::{Rest, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value};

/// A filter with named parameters.
type Named = fn(&Value, &Arguments) -> Result<Value, Error>;
/// A filter with other filters or tests as arguments.
type Calling = fn(&mut State<'_, '_>, &Value, &[Value]) -> Result<Value, Error>;

/// Arguments of a filter in the order of its parameters.
pub(super) struct Arguments(Vec<Option<Value>>);

impl Arguments {
    /// An argument, unless left out.
    fn get(&self, i: usize) -> Option<&Value> {
        self.0.get(i)?.as_ref()
    }

    /// An argument other than `none`.
    fn some(&self, i: usize) -> Option<&Value> {
        self.get(i).filter(|v| !v.is_none())
    }

    fn is_true(&self, i: usize) -> bool {
        self.get(i).is_some_and(Value::is_true)
    }

    fn int(&self, i: usize, default: i128) -> Result<i128, Error> {
        self.get(i).map_or(Ok(default), |v| {
            let name = Kind::of(v).name();
            integer(v).ok_or_else(|| invalid(format!("'{name}' object cannot be interpreted as an integer")))
        })
    }

    fn needed(&self, i: usize) -> Result<&Value, Error> {
        self.get(i).ok_or_else(|| invalid("a filter lacks an argument"))
    }
}

/// Registers all filters.
pub(super) fn add(env: &mut Environment<'static>) {
    for (names, parameters, filter) in text::FILTERS.iter().chain(sequence::FILTERS) {
        for name in *names {
            add_named(env, name, parameters, *filter);
        }
    }
    for (name, filter) in choose::FILTERS {
        env.add_filter(*name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            let (value, rest) = given(&args).split_first().ok_or_else(|| invalid("a filter of nothing"))?;
            rest.iter().try_for_each(weigh)?;
            filter(state, value, rest)
        });
    }
}

/// The names of all filters.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    let named = text::FILTERS.iter().chain(sequence::FILTERS).flat_map(|(names, ..)| names.iter().copied());
    named.chain(choose::FILTERS.iter().map(|(name, _)| *name))
}

fn add_named(env: &mut Environment<'static>, name: &'static str, parameters: &'static [&str], filter: Named) {
    env.add_filter(name, move |args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        let (value, rest) = given(&args).split_first().ok_or_else(|| invalid("a filter of nothing"))?;
        rest.iter().try_for_each(weigh)?;
        filter(value, &Arguments(bind(name, parameters, rest)?))
    });
}
