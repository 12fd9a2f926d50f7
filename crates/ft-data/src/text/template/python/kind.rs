//! Types of values in Python's sense, and objects beyond the engine's.

use crate::text::template::bounds::{spend, weigh};
use minijinja::value::{Enumerator, Object, ObjectRepr, Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Longest range in items, as in Jinja2's sandbox.
const LONGEST_RANGE: i128 = 100_000;

/// An error for invalid operations in a template.
pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// The Python type of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Undefined,
    None,
    Bool,
    Int,
    Float,
    Str,
    List,
    Tuple,
    Dict,
    View,
    Range,
    Generator,
    Other,
}

impl Kind {
    pub fn of(v: &Value) -> Self {
        match v.kind() {
            ValueKind::Undefined => Kind::Undefined,
            ValueKind::None => Kind::None,
            ValueKind::Bool => Kind::Bool,
            ValueKind::Number if v.is_integer() => Kind::Int,
            ValueKind::Number => Kind::Float,
            ValueKind::String => Kind::Str,
            _ => v.as_object().map_or(Kind::Other, |_| Self::of_object(v)),
        }
    }

    fn of_object(v: &Value) -> Self {
        if v.is_tuple() || v.downcast_object_ref::<Group>().is_some() {
            return Kind::Tuple;
        }
        if v.downcast_object_ref::<Range>().is_some() {
            return Kind::Range;
        }
        if v.downcast_object_ref::<View>().is_some() {
            return Kind::View;
        }
        let Some(object) = v.as_object() else { return Kind::Other };
        match object.repr() {
            ObjectRepr::Seq => Kind::List,
            ObjectRepr::Iterable => Kind::Generator,
            ObjectRepr::Map if !is_engines(object.type_name()) => Kind::Dict,
            _ => Kind::Other,
        }
    }

    pub fn is_number(self) -> bool {
        matches!(self, Kind::Bool | Kind::Int | Kind::Float)
    }

    /// Python's name of the type.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Undefined => "Undefined",
            Kind::None => "NoneType",
            Kind::Bool => "bool",
            Kind::Int => "int",
            Kind::Float => "float",
            Kind::Str => "str",
            Kind::List => "list",
            Kind::Tuple => "tuple",
            Kind::Dict => "dict",
            Kind::View => "view",
            Kind::Range => "range",
            Kind::Generator => "generator",
            Kind::Other => "object",
        }
    }
}

/// Objects of the engine with attributes, which are no dicts.
fn is_engines(name: &str) -> bool {
    ["::Namespace", "::Loop", "::Macro"].iter().any(|end| name.ends_with(end))
}

/// The value of an integer or a boolean.
pub(crate) fn integer(v: &Value) -> Option<i128> {
    match Kind::of(v) {
        Kind::Bool => Some(i128::from(v.is_true())),
        Kind::Int => i128::try_from(v.clone()).ok(),
        _ => None,
    }
}

/// The value of a float.
pub(crate) fn float(v: &Value) -> Option<f64> {
    (Kind::of(v) == Kind::Float).then(|| f64::try_from(v.clone()).ok()).flatten()
}

/// An integer as a value.
pub(crate) fn from_int(n: i128) -> Value {
    i64::try_from(n).map_or_else(|_| Value::from(n), Value::from)
}

/// A text as a value, of the given safety (`Markup`).
pub(crate) fn text_value(text: String, safe: bool) -> Value {
    if safe { Value::from_safe_string(text) } else { Value::from(text) }
}

/// A tuple of values.
pub(crate) fn tuple(items: Vec<Value>) -> Value {
    Value::from(Tuple::from(items))
}

/// Items that can be read once; always true, and without a length.
#[derive(Debug)]
pub(crate) struct Generator(Mutex<VecDeque<Value>>);

impl Generator {
    /// A generator of `items`. An error ends the items, and is raised once reached.
    pub fn value(items: impl Iterator<Item = Result<Value, Error>>) -> Value {
        let mut all = VecDeque::new();
        for item in items {
            let item = item.and_then(|v| weigh(&v).map(|()| v));
            let failed = item.is_err();
            all.push_back(item.unwrap_or_else(Value::from));
            if failed {
                break;
            }
        }
        Value::from_object(Self(Mutex::new(all)))
    }

    /// A generator that raises an error at once.
    pub fn failed(e: Error) -> Value {
        Self::value(std::iter::once(Err(e)))
    }
}

struct Rest(Arc<Generator>);

impl Iterator for Rest {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let n = self.0.0.lock().unwrap_or_else(PoisonError::into_inner).len();
        (n, Some(n))
    }
}

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    /// An item that stays.
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Iter(Box::new(Rest(self.clone())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }
}

/// A view of a dict: `items()`, `keys()`, `values()`.
#[derive(Debug)]
pub(crate) struct View {
    /// Python's name of the type.
    pub name: &'static str,
    pub items: Vec<Value>,
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items.clone())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.items.len())
    }
}

/// Integers from `start` by `step`.
#[derive(Debug)]
pub(crate) struct Range {
    pub start: i128,
    pub stop: i128,
    pub step: i128,
}

impl Range {
    /// A range with Python's arguments.
    ///
    /// # Errors
    /// A step of zero, or more items than Jinja2's sandbox allows.
    pub fn value(start: i128, stop: i128, step: i128) -> Result<Value, Error> {
        if step == 0 {
            return Err(invalid("range() arg 3 must not be zero"));
        }
        let range = Self { start, stop, step };
        if range.len() > LONGEST_RANGE {
            return Err(invalid(format!("range too big; the maximum is {LONGEST_RANGE}")));
        }
        spend(usize::try_from(range.len()).unwrap_or(0).saturating_mul(8))?;
        Ok(Value::from_object(range))
    }

    pub fn len(&self) -> i128 {
        let span = if self.step > 0 {
            self.stop.saturating_sub(self.start)
        } else {
            self.start.saturating_sub(self.stop)
        };
        let step = self.step.saturating_abs();
        if span <= 0 { 0 } else { (span - 1) / step + 1 }
    }
}

impl Object for Range {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let i = i128::try_from(key.as_usize()?).ok()?;
        (i < self.len()).then(|| from_int(self.start + i * self.step))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(usize::try_from(self.len()).unwrap_or(0))
    }
}

/// A group of `groupby`: a tuple of two with names.
#[derive(Debug)]
pub(crate) struct Group {
    pub grouper: Value,
    pub list: Value,
}

impl Object for Group {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match (key.as_usize(), key.as_str()) {
            (Some(0), _) | (_, Some("grouper")) => Some(self.grouper.clone()),
            (Some(1), _) | (_, Some("list")) => Some(self.list.clone()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(2)
    }
}

/// A method of a value, not yet called.
#[derive(Debug)]
pub(crate) struct Bound {
    pub object: Value,
    pub name: String,
}

impl Object for Bound {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(vec![self.object.clone()])
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        super::methods::call(state, &self.object, &self.name, args)
    }
}
