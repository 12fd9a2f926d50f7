//! Arithmetic with Python's rules: integers stay integers, `//` and `%` round down.

use super::access::repeat;
use super::kind::{Kind, float, from_int, integer, invalid, text_value, tuple};
use super::percent;
use super::text::escaped;
use crate::text::template::bounds::{spend, weigh};
use minijinja::{Error, ErrorKind, Value};

/// A number of either type.
#[derive(Clone, Copy)]
pub(crate) enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    pub fn of(v: &Value) -> Option<Self> {
        integer(v).map(Number::Int).or_else(|| float(v).map(Number::Float))
    }

    pub fn float(self) -> f64 {
        match self {
            Number::Int(n) => n as f64,
            Number::Float(x) => x,
        }
    }
}

fn unsupported(op: &str, a: &Value, b: &Value) -> Error {
    if a.is_undefined() || b.is_undefined() {
        return Error::new(ErrorKind::UndefinedError, format!("an operand of {op} is undefined"));
    }
    let (a, b) = (Kind::of(a).name(), Kind::of(b).name());
    invalid(format!("unsupported operand type(s) for {op}: '{a}' and '{b}'"))
}

pub(crate) fn too_large() -> Error {
    invalid("an integer is too large")
}

fn by_zero() -> Error {
    invalid("division by zero")
}

/// The result of an operator, computed by `whole` for two integers, else by `real`.
fn compute(
    op: &str,
    a: &Value,
    b: &Value,
    whole: fn(i128, i128) -> Result<Number, Error>,
    real: fn(f64, f64) -> Result<f64, Error>,
) -> Result<Value, Error> {
    let (Some(x), Some(y)) = (Number::of(a), Number::of(b)) else { return Err(unsupported(op, a, b)) };
    let out = match (x, y) {
        (Number::Int(x), Number::Int(y)) => whole(x, y)?,
        (x, y) => Number::Float(real(x.float(), y.float())?),
    };
    Ok(match out {
        Number::Int(n) => from_int(n),
        Number::Float(x) => Value::from(x),
    })
}

fn int(n: Option<i128>) -> Result<Number, Error> {
    n.map(Number::Int).ok_or_else(too_large)
}

/// `a + b`.
pub(crate) fn add(a: &Value, b: &Value) -> Result<Value, Error> {
    match (Kind::of(a), Kind::of(b)) {
        (Kind::Str, Kind::Str) if a.is_safe() || b.is_safe() => {
            Ok(Value::from_safe_string(escaped(a)? + &escaped(b)?))
        }
        (Kind::Str, Kind::Str) => {
            let (x, y) = (a.as_str().unwrap_or_default(), b.as_str().unwrap_or_default());
            spend(x.len() + y.len())?;
            Ok(Value::from([x, y].concat()))
        }
        (ka @ (Kind::List | Kind::Tuple), kb) if ka == kb => {
            let mut out = super::access::iterate(a)?;
            out.extend(super::access::iterate(b)?);
            out.iter().try_for_each(weigh)?;
            Ok(if ka == Kind::List { Value::from(out) } else { tuple(out) })
        }
        _ => compute("+", a, b, |x, y| int(x.checked_add(y)), |x, y| Ok(x + y)),
    }
}

/// `a - b`.
pub(crate) fn subtract(a: &Value, b: &Value) -> Result<Value, Error> {
    compute("-", a, b, |x, y| int(x.checked_sub(y)), |x, y| Ok(x - y))
}

/// `a * b`.
pub(crate) fn multiply(a: &Value, b: &Value) -> Result<Value, Error> {
    let is_sequence = |v: &Value| matches!(Kind::of(v), Kind::Str | Kind::List | Kind::Tuple);
    match (is_sequence(a), is_sequence(b), integer(a), integer(b)) {
        (true, _, _, Some(n)) => repeat(a, n),
        (_, true, Some(n), _) => repeat(b, n),
        _ => compute("*", a, b, |x, y| int(x.checked_mul(y)), |x, y| Ok(x * y)),
    }
}

/// `a / b`, always a float.
pub(crate) fn divide(a: &Value, b: &Value) -> Result<Value, Error> {
    let real = |x: f64, y: f64| if y == 0.0 { Err(by_zero()) } else { Ok(x / y) };
    compute(
        "/",
        a,
        b,
        |x, y| if y == 0 { Err(by_zero()) } else { Ok(Number::Float(x as f64 / y as f64)) },
        real,
    )
}

/// `a // b`, rounded down.
pub(crate) fn floor_divide(a: &Value, b: &Value) -> Result<Value, Error> {
    let whole = |x: i128, y: i128| {
        if y == 0 {
            return Err(by_zero());
        }
        let q = x.checked_div(y).ok_or_else(too_large)?;
        Ok(Number::Int(if x % y != 0 && (x < 0) != (y < 0) { q - 1 } else { q }))
    };
    compute("//", a, b, whole, |x, y| floored(x, y).map(|(q, _)| q))
}

/// `a % b` with the sign of `b`; for texts, `%` formatting.
pub(crate) fn remainder(a: &Value, b: &Value) -> Result<Value, Error> {
    if let Some(format) = a.as_str() {
        return percent::percent(format, a.is_safe(), b).map(|text| text_value(text, a.is_safe()));
    }
    let whole = |x: i128, y: i128| {
        if y == 0 {
            return Err(by_zero());
        }
        let r = x.checked_rem(y).ok_or_else(too_large)?;
        Ok(Number::Int(if r != 0 && (r < 0) != (y < 0) { r + y } else { r }))
    };
    compute("%", a, b, whole, |x, y| floored(x, y).map(|(_, r)| r))
}

/// Quotient and remainder of floats, as CPython's `float_divmod`.
fn floored(x: f64, y: f64) -> Result<(f64, f64), Error> {
    if y == 0.0 {
        return Err(by_zero());
    }
    let mut r = x % y;
    let mut q = (x - r) / y;
    if r == 0.0 {
        r = 0f64.copysign(y);
    } else if (y < 0.0) != (r < 0.0) {
        r += y;
        q -= 1.0;
    }
    let q = if q == 0.0 {
        0f64.copysign(x / y)
    } else {
        let floor = q.floor();
        if q - floor > 0.5 { floor + 1.0 } else { floor }
    };
    Ok((q, r))
}

/// `a ** b`.
pub(crate) fn power(a: &Value, b: &Value) -> Result<Value, Error> {
    let whole = |x: i128, y: i128| match u32::try_from(y) {
        Ok(y) => int(x.checked_pow(y)),
        Err(_) if y > 0 && x.unsigned_abs() < 2 => Ok(Number::Int(if x == -1 && y % 2 == 0 { 1 } else { x })),
        Err(_) if y > 0 => Err(too_large()),
        Err(_) => real_power(x as f64, y as f64).map(Number::Float),
    };
    compute("**", a, b, whole, real_power)
}

fn real_power(x: f64, y: f64) -> Result<f64, Error> {
    if x == 0.0 && y < 0.0 {
        return Err(invalid("0.0 cannot be raised to a negative power"));
    }
    if x < 0.0 && x.is_finite() && y.is_finite() && y.fract() != 0.0 {
        return Err(invalid("complex numbers are not built yet"));
    }
    let out = x.powf(y);
    if out.is_infinite() && x.is_finite() && y.is_finite() {
        return Err(invalid("a power is too large for a float"));
    }
    Ok(out)
}

/// `-v`.
pub(crate) fn negate(v: &Value) -> Result<Value, Error> {
    match Number::of(v) {
        Some(Number::Int(n)) => n.checked_neg().map(from_int).ok_or_else(too_large),
        Some(Number::Float(x)) => Ok(Value::from(-x)),
        None if v.is_undefined() => Err(Error::from(ErrorKind::UndefinedError)),
        None => Err(invalid(format!("bad operand type for unary -: '{}'", Kind::of(v).name()))),
    }
}
