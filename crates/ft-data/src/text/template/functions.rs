//! Functions of Jinja2 and of transformers.

use super::bounds::{weigh, weigh_data};
use super::python::access::iterate;
use super::python::compare::check_key;
use super::python::kind::{Range, integer, invalid};
use super::python::methods::{bind, given, pairs};
use crate::text::date;
use minijinja::value::{Enumerator, Object, ObjectRepr, Rest, Value, ValueOrKwargs};
use minijinja::{Environment, Error, State, functions};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

type Function = fn(&[Value]) -> Result<Value, Error>;

const ALL: &[(&str, Function)] = &[
    ("range", range),
    ("dict", dict),
    ("cycler", |args| match args.iter().any(Value::is_kwargs) || args.is_empty() {
        true => Err(invalid("cycler wants at least one item")),
        false => Ok(Value::from_object(Cycler { items: args.to_vec(), at: AtomicUsize::new(0) })),
    }),
    ("joiner", |args| {
        let between = bind("joiner", &["sep"], args)?.pop().flatten().unwrap_or(Value::from(", "));
        Ok(Value::from_object(Joiner { between, calls: AtomicUsize::new(0) }))
    }),
    ("raise_exception", |args| {
        let message = bind("raise_exception", &["message"], args)?.pop().flatten();
        Err(invalid(message.map_or_else(String::new, |m| m.to_string())))
    }),
    ("strftime_now", |args| match bind("strftime_now", &["format"], args)?.pop().flatten() {
        Some(format) if format.as_str().is_some() => {
            date::now(format.as_str().unwrap_or_default()).map(Value::from).map_err(invalid)
        }
        _ => Err(invalid("strftime_now wants a format")),
    }),
];

/// Registers all functions.
pub(super) fn add(env: &mut Environment<'static>) {
    for (name, function) in ALL {
        env.add_function(*name, move |args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            args.iter().try_for_each(weigh_data)?;
            function(given(&args))
        });
    }
    let namespace = Value::from_function(functions::namespace);
    env.add_function("namespace", move |state: &mut State, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        args.iter().try_for_each(weigh_data)?;
        namespace.call(state, &[dict(given(&args))?])
    });
}

fn range(args: &[Value]) -> Result<Value, Error> {
    let numbers: Option<Vec<i128>> = args.iter().map(integer).collect();
    match numbers.as_deref() {
        Some([stop]) => Range::value(0, *stop, 1),
        Some([start, stop]) => Range::value(*start, *stop, 1),
        Some([start, stop, step]) => Range::value(*start, *stop, *step),
        _ => Err(invalid("range() takes one to three integers")),
    }
}

fn dict(args: &[Value]) -> Result<Value, Error> {
    let (first, keywords) = match args {
        [] => (None, Vec::new()),
        [only] if only.is_kwargs() => (None, pairs(only)?),
        [first] => (Some(first), Vec::new()),
        [first, last] if last.is_kwargs() => (Some(first), pairs(last)?),
        _ => return Err(invalid("dict expected at most 1 argument")),
    };
    let mut all = Vec::new();
    match first {
        None => {}
        Some(v) if v.as_object().is_some_and(|o| o.repr() == ObjectRepr::Map) => all = pairs(v)?,
        Some(v) => {
            for pair in iterate(v)? {
                match iterate(&pair)?.as_slice() {
                    [key, value] => {
                        check_key(key)?;
                        all.push((key.clone(), value.clone()));
                    }
                    _ => return Err(invalid("dict wants pairs")),
                }
            }
        }
    }
    all.extend(keywords);
    all.iter().try_for_each(|(k, v)| weigh(k).and_then(|()| weigh(v)))?;
    Ok(Value::from_pairs(all))
}

/// Items in turn.
#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    at: AtomicUsize,
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items.clone())
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = self.at.load(Relaxed);
        (key.as_str() == Some("current")).then(|| self.items[at % self.items.len()].clone())
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        name: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        match (name, given(args)) {
            ("next", []) => Ok(self.items[self.at.fetch_add(1, Relaxed) % self.items.len()].clone()),
            ("reset", []) => {
                self.at.store(0, Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(invalid(format!("a cycler has no method {name}"))),
        }
    }
}

/// A separator from the second call on.
#[derive(Debug)]
struct Joiner {
    between: Value,
    calls: AtomicUsize,
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(vec![self.between.clone()])
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        match (given(args), self.calls.fetch_add(1, Relaxed)) {
            ([], 0) => Ok(Value::from("")),
            ([], _) => Ok(self.between.clone()),
            _ => Err(invalid("a joiner takes no arguments")),
        }
    }
}
