//! Tests of Jinja2 (`is ..`), by name. Tests of the engine beyond those are refused, as Jinja2 refuses them.

use super::bounds::weigh;
use super::filters;
use super::python::access::length;
use super::python::compare::{check_key, equal, holds};
use super::python::kind::{Kind, invalid};
use super::python::methods::given;
use super::python::number::remainder;
use super::python::text::text;
use minijinja::value::{DynObject, ObjectRepr, Rest, ValueOrKwargs};
use minijinja::{Environment, Error, Value, tests};

type Test = fn(&Value) -> Result<bool, Error>;
type Pair = fn(&Value, &Value) -> Result<bool, Error>;

/// Tests without an argument.
const ALONE: &[(&str, Test)] = &[
    ("defined", |v| Ok(!v.is_undefined())),
    ("undefined", |v| Ok(v.is_undefined())),
    ("none", |v| Ok(v.is_none())),
    ("boolean", |v| Ok(Kind::of(v) == Kind::Bool)),
    ("true", |v| Ok(Kind::of(v) == Kind::Bool && v.is_true())),
    ("false", |v| Ok(Kind::of(v) == Kind::Bool && !v.is_true())),
    ("integer", |v| Ok(Kind::of(v) == Kind::Int)),
    ("float", |v| Ok(Kind::of(v) == Kind::Float)),
    ("number", |v| Ok(Kind::of(v).is_number())),
    ("string", |v| Ok(Kind::of(v) == Kind::Str)),
    ("mapping", |v| Ok(Kind::of(v) == Kind::Dict)),
    ("sequence", |v| {
        let kind = Kind::of(v);
        Ok(matches!(kind, Kind::Str | Kind::List | Kind::Tuple | Kind::Dict | Kind::Range | Kind::Undefined))
    }),
    ("iterable", |v| {
        let kind = Kind::of(v);
        Ok(length(v).is_ok() || kind == Kind::Generator)
    }),
    ("callable", |v| {
        let called = |o: &DynObject| o.repr() == ObjectRepr::Plain || o.type_name().ends_with("::Macro");
        Ok(v.is_undefined() || v.as_object().is_some_and(called))
    }),
    ("escaped", |v| Ok(v.is_safe())),
    ("odd", |v| equal(&remainder(v, &Value::from(2))?, &Value::from(1))),
    ("even", |v| equal(&remainder(v, &Value::from(2))?, &Value::from(0))),
    ("lower", |v| cased(v, char::is_lowercase, char::is_uppercase)),
    ("upper", |v| cased(v, char::is_uppercase, char::is_lowercase)),
];

/// Tests with one argument.
const PAIRS: &[(&[&str], Pair)] = &[
    (&["eq", "equalto", "=="], |a, b| holds("Eq", a, b)),
    (&["ne", "!="], |a, b| holds("Ne", a, b)),
    (&["lt", "lessthan", "<"], |a, b| holds("Lt", a, b)),
    (&["le", "<="], |a, b| holds("Lte", a, b)),
    (&["gt", "greaterthan", ">"], |a, b| holds("Gt", a, b)),
    (&["ge", ">="], |a, b| holds("Gte", a, b)),
    (&["in"], |a, b| holds("In", a, b)),
    (&["divisibleby"], |v, n| equal(&remainder(v, n)?, &Value::from(0))),
    (&["sameas"], |a, b| match (Kind::of(a), Kind::of(b)) {
        (Kind::Undefined, _) => Ok(false),
        (ka, kb) if a.as_object().is_none() => Ok(ka == kb && equal(a, b)?),
        _ => Ok(tests::is_sameas(a, b)),
    }),
];

/// `str(v).islower()` and `isupper()`.
fn cased(v: &Value, wanted: fn(char) -> bool, other: fn(char) -> bool) -> Result<bool, Error> {
    let text = text(v)?;
    Ok(text.chars().any(wanted) && !text.chars().any(other))
}

/// Registers all tests.
pub(super) fn add(env: &mut Environment<'static>) {
    for (name, test) in ALONE {
        env.add_test(*name, move |args: Rest<ValueOrKwargs>| match given(&args.into_values()) {
            [v] => test(v),
            _ => Err(invalid(format!("the test {name:?} takes no argument"))),
        });
    }
    for (names, test) in PAIRS {
        for name in *names {
            env.add_test(*name, move |args: Rest<ValueOrKwargs>| match given(&args.into_values()) {
                [a, b] => weigh(a).and_then(|()| weigh(b)).and_then(|()| test(a, b)),
                _ => Err(invalid(format!("the test {name:?} takes one argument"))),
            });
        }
    }
    env.add_test("filter", |name: &Value| is_known(filters::names(), name));
    env.add_test("test", |name: &Value| is_known(names(), name));
}

fn names() -> impl Iterator<Item = &'static str> {
    let pairs = PAIRS.iter().flat_map(|(names, _)| names.iter().copied());
    ALONE.iter().map(|(name, _)| *name).chain(pairs).chain(["filter", "test"])
}

fn is_known(mut names: impl Iterator<Item = &'static str>, name: &Value) -> Result<bool, Error> {
    check_key(name)?;
    Ok(name.as_str().is_some_and(|name| names.any(|n| n == name)))
}
