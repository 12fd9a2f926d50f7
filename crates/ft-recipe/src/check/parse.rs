//! Parses one value by the kind of its key.

use super::describe::found;
use super::foreign::Foreign;
use super::suggestions::words_hint;
use super::values::{self, Rejection, rejection};
use crate::keys::{Bound, Checked, INDEX, Interval, Kind, OneDevice, Recompute};
use crate::syntax::{Node, Value, parse_value, quote};

/// Parses a value with at most one problem.
pub(super) fn parse(kind: Kind, value: &Value, path: &str) -> Result<Checked, Rejection> {
    let of_another_kind =
        || Rejection { message: None, hints: other_kind(kind, value, path).into_iter().collect() };
    match (kind, value) {
        (Kind::Int(from, to) | Kind::IntOrAuto(from, to), Value::Int(i)) => {
            let i = u64::try_from(*i).ok().filter(|i| (from..=to).contains(i));
            i.map(Checked::Int).ok_or_else(Rejection::default)
        }
        (Kind::IntOrAuto(..), Value::Text(s)) if s == "auto" => Ok(Checked::Auto),
        (Kind::Every(from, to), Value::Int(i)) => {
            let steps = usize::try_from(*i).ok().filter(|i| (from..=to).contains(&(*i as u64)));
            steps.map(|n| Checked::Interval(Interval::Steps(n))).ok_or_else(Rejection::default)
        }
        (Kind::Every(..), Value::Text(s)) => {
            Interval::from_text(s).map(Checked::Interval).ok_or_else(of_another_kind)
        }
        (Kind::Number(bound), Value::Int(_) | Value::Float(_)) => {
            let x = number(value).filter(|x| bound.holds(*x)).ok_or_else(Rejection::default)?;
            in_single(path, x).map(Checked::Number)
        }
        (Kind::Bool, Value::Bool(b)) => Ok(Checked::Bool(*b)),
        (Kind::Text, Value::Text(s)) if Foreign::value(path, s).is_some() => Err(unknown_word(s, &[], path)),
        (Kind::Text, Value::Text(s)) if !s.trim().is_empty() && !s.contains('\0') => {
            Ok(Checked::Text(s.clone()))
        }
        (Kind::Name, Value::Text(s)) if values::is_name(s) => Ok(Checked::Text(s.clone())),
        (Kind::Word(words), Value::Text(s)) => word(words, s, path).map(Checked::Text),
        (Kind::Anything, Value::Table(t)) => values::json(t, path).map(Checked::Json),
        (Kind::Strings, Value::Table(t)) => values::strings(t, path).map(Checked::Strings),
        (Kind::Tokens, Value::List(list)) => values::tokens(list, path).map(Checked::Tokens),
        (Kind::Layers, v) => values::layers(v).map(Checked::Layers),
        (Kind::Experts, v) => values::experts(v).map(Checked::Experts),
        (Kind::Counts, Value::List(list)) => values::counts(list).map(Checked::Counts),
        (Kind::Betas, Value::List(list)) => betas(list, path).map(Checked::Pair),
        (Kind::Bytes, v) => values::bytes(v, path).map(Checked::Int),
        (Kind::Recompute, Value::Text(s)) => {
            let known = Recompute::WORDS.into_iter().find(|(word, _)| word == s);
            let words = Recompute::WORDS.map(|(word, _)| word);
            known.map(|(_, r)| Checked::Recompute(r)).ok_or_else(|| unknown_word(s, &words, path))
        }
        (Kind::Recompute, Value::Int(i)) => {
            let n = usize::try_from(*i).ok().filter(|n| *n as u64 <= INDEX);
            n.map(|n| Checked::Recompute(Recompute::Layers(n))).ok_or_else(Rejection::default)
        }
        _ => Err(of_another_kind()),
    }
}

/// Parses one entry of a list of strings.
pub(super) fn entry(kind: Kind, value: &Value, path: &str) -> Result<String, Rejection> {
    match (kind, value) {
        (Kind::Words(words), Value::Text(s)) => word(words, s, path),
        (Kind::Words(words), _) => {
            let words: Vec<&str> = words.iter().map(|(w, _)| *w).collect();
            Err(Rejection { message: None, hints: words_hint(path, "", &words) })
        }
        (Kind::Devices, value) => {
            let device = if let Value::Text(s) = value { OneDevice::from_word(s) } else { None };
            let wrong = || {
                rejection(
                    format!("{path} has no {}", found(value)),
                    format!("{} is wanted", OneDevice::SPELT),
                )
            };
            device.map(OneDevice::word).ok_or_else(wrong)
        }
        (Kind::Modules, Value::Text(s)) if Foreign::value(path, s).is_some() => {
            Err(unknown_word(s, &[], path))
        }
        (Kind::Texts, Value::Text(s)) if !s.trim().is_empty() && !s.contains('\0') => Ok(s.clone()),
        (Kind::Texts, _) => Err(Rejection::default()),
        (_, Value::Text(s)) => values::module(s).map(|()| s.clone()),
        _ => Err(Rejection::default()),
    }
}

fn word(words: &[(&str, &str)], s: &str, path: &str) -> Result<String, Rejection> {
    let words: Vec<&str> = words.iter().map(|(w, _)| *w).collect();
    if words.contains(&s) { Ok(s.to_string()) } else { Err(unknown_word(s, &words, path)) }
}

fn unknown_word(s: &str, words: &[&str], path: &str) -> Rejection {
    Rejection { message: Some(format!("{path} has no {}", quote(s))), hints: words_hint(path, s, words) }
}

fn betas(list: &[Node], path: &str) -> Result<[f64; 2], Rejection> {
    let beta = |n: &Node| number(&n.value).filter(|x| Bound::BelowOne.holds(*x));
    match list {
        [a, b] => match (beta(a), beta(b)) {
            (Some(a), Some(b)) => Ok([in_single(path, a)?, in_single(path, b)?]),
            _ => Err(Rejection::default()),
        },
        _ => Err(Rejection::default()),
    }
}

/// A hint for a value of another kind.
fn other_kind(kind: Kind, value: &Value, path: &str) -> Option<String> {
    match (kind, value) {
        (Kind::Table(_), Value::Text(_)) if path == "parallel" => Some("or \"auto\"".into()),
        (Kind::Tables(_), Value::Table(_)) => Some(format!("a list of tables has two brackets: [[{path}]]")),
        (Kind::Tables(keys), Value::Text(s)) if keys.iter().any(|k| k.name == "source") => {
            Some(format!("write [{{ source = {} }}]", quote(s)))
        }
        (Kind::Texts | Kind::Modules | Kind::Tokens | Kind::Words(_) | Kind::Devices, Value::Text(s)) => {
            Some(format!("write [{}]", quote(s)))
        }
        (
            Kind::Int(..) | Kind::IntOrAuto(..) | Kind::Every(..) | Kind::Number(_) | Kind::Bool,
            Value::Text(s),
        ) => {
            let bare = parse_value(s).is_some_and(|n| !matches!(n.value, Value::Text(_)));
            bare.then(|| format!("without quotes: {s}"))
        }
        (Kind::Every(..), Value::Float(x)) if *x > 0.0 && *x < 1.0 => {
            Some(format!("a share of all steps is a string: {}", quote(&Interval::percent_text(*x))))
        }
        (_, Value::Bool(b)) => Foreign::value(path, &b.to_string()).map(Foreign::value_hint),
        _ => None,
    }
}

/// Keys used in f64 arithmetic; all remaining numbers are converted to f32.
const DOUBLE: [&str; 3] = ["epochs", "warmup_ratio", "weight"];

/// Rejects a number turned into 0, 1 or infinity by conversion to f32.
fn in_single(path: &str, x: f64) -> Result<f64, Rejection> {
    let single = x as f32;
    let other = if single == 0.0 && x != 0.0 {
        "0"
    } else if single == 1.0 && x < 1.0 {
        "1"
    } else if single.is_infinite() {
        "infinite"
    } else {
        return Ok(x);
    };
    if path.rsplit('.').next().is_some_and(|key| DOUBLE.contains(&key)) {
        return Ok(x);
    }
    let message = format!("{path}: {x:?} is {other} in f32, which it is computed in");
    let hint = match other {
        "0" => "f32 holds numbers from 1e-45 on; the usual ones are far above",
        "1" => "the largest below 1 in f32 is 0.99999994",
        _ => "f32 holds numbers up to 3.4e38",
    };
    Err(rejection(message, hint))
}

/// The value of an integer or float.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Int(i) => Some(*i as f64),
        Value::Float(x) => Some(*x),
        _ => None,
    }
}
