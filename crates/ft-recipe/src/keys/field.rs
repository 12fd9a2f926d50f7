//! Conversion between checked values, typed values and TOML.

use super::checked::Checked;
use super::kind::Kind;
use super::sets::{IndexSet, LayerSet, Recompute, Token};
use super::size::format_bytes;
use crate::syntax::{quote, quote_key};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A free table of a recipe, such as `model.override`.
pub type Json = serde_json::Map<String, serde_json::Value>;

/// The value of a key, formatted for the resolved recipe.
#[derive(Debug)]
pub(crate) enum Formatted {
    /// No value.
    Nothing,
    /// TOML text.
    Value(String),
    /// A table.
    Table(Keys),
    /// A list of tables.
    Tables(Vec<Keys>),
}

impl Formatted {
    /// Formats the value for a key of this kind: sizes get a unit.
    pub fn of(self, kind: Kind) -> Self {
        match (kind, self) {
            (Kind::Bytes, Formatted::Value(v)) => Formatted::Value(v.parse().map_or(v, format_bytes)),
            (_, written) => written,
        }
    }
}

/// The keys of a table in documentation order, with values.
pub(crate) type Keys = Vec<(&'static str, Formatted)>;

/// The type of a key's value.
pub(crate) trait Field: Sized {
    /// Converts a checked value. Without one, or after a reported problem, returns the type's default.
    fn read(checked: Option<&Checked>) -> Self;

    /// Formats the value as TOML that parses to an equal value.
    fn write(&self) -> Formatted;
}

/// Implements `Field` for types backed by one variant of [`Checked`].
macro_rules! plain {
    ($($type:ty: $variant:ident($checked:ident) => $read:expr, $own:ident => $write:expr;)+) => {$(
        impl Field for $type {
            fn read(checked: Option<&Checked>) -> Self {
                match checked {
                    Some(Checked::$variant($checked)) => $read,
                    _ => Default::default(),
                }
            }

            fn write(&self) -> Formatted {
                let $own = self;
                Formatted::Value($write)
            }
        }
    )+};
}

plain! {
    u8: Int(i) => u8::try_from(*i).unwrap_or(u8::MAX), i => i.to_string();
    u16: Int(i) => u16::try_from(*i).unwrap_or(u16::MAX), i => i.to_string();
    u32: Int(i) => u32::try_from(*i).unwrap_or(u32::MAX), i => i.to_string();
    u64: Int(i) => *i, i => i.to_string();
    usize: Int(i) => usize::try_from(*i).unwrap_or(usize::MAX), i => i.to_string();
    // Rust's shortest round-trip format is valid TOML.
    f64: Number(x) => *x, x => format!("{x:?}");
    bool: Bool(b) => *b, b => b.to_string();
    String: Text(s) => s.clone(), s => quote(s);
    PathBuf: Text(s) => PathBuf::from(s), p => quote(&p.to_string_lossy());
    Vec<String>: Texts(list) => list.clone(), list => list_of(list.iter());
    Vec<usize>: Counts(list) => list.clone(), list => format!("{list:?}");
    [f64; 2]: Pair(pair) => *pair, pair => format!("[{:?}, {:?}]", pair[0], pair[1]);
    Json: Json(map) => map.clone(), map => object(map);
    BTreeMap<String, String>: Strings(map) => map.clone(),
        map => inline(map.iter().map(|(k, v)| (k.as_str(), quote(v))));
    Vec<Token>: Tokens(list) => list.clone(),
        list => format!("[{}]", list.iter().map(Token::to_string).collect::<Vec<_>>().join(", "));
    IndexSet: Experts(set) => set.clone(), set => indices(set);
    Recompute: Recompute(r) => *r, r => match r {
        Recompute::Layers(n) => n.to_string(),
        word => Recompute::WORDS.iter().find(|(_, r)| r == word).map_or_else(String::new, |(w, _)| quote(w)),
    };
}

impl<T: Field> Field for Option<T> {
    fn read(checked: Option<&Checked>) -> Self {
        checked.map(|_| T::read(checked))
    }

    fn write(&self) -> Formatted {
        self.as_ref().map_or(Formatted::Nothing, T::write)
    }
}

impl Field for Option<LayerSet> {
    fn read(checked: Option<&Checked>) -> Self {
        match checked {
            Some(Checked::Layers(set)) => set.clone(),
            _ => None,
        }
    }

    fn write(&self) -> Formatted {
        Formatted::Value(match self {
            None => quote("all"),
            Some(LayerSet::Last(n)) => quote(&format!("-{n}:")),
            Some(LayerSet::Indices(set)) => indices(set),
        })
    }
}

fn indices(set: &IndexSet) -> String {
    match set {
        IndexSet::Range(0, None) => quote("0-"),
        IndexSet::Range(a, None) => quote(&format!("{a}-")),
        IndexSet::Range(a, Some(b)) => quote(&format!("{a}-{b}")),
        IndexSet::List(list) => format!("{list:?}"),
    }
}

pub(super) fn list_of(words: impl Iterator<Item = impl AsRef<str>>) -> String {
    format!("[{}]", words.map(|w| quote(w.as_ref())).collect::<Vec<_>>().join(", "))
}

/// A JSON value as TOML, without nulls, which TOML does not have; `None` for null itself.
pub(crate) fn of_json(value: &serde_json::Value) -> Option<String> {
    Some(match value {
        serde_json::Value::Null => return None,
        serde_json::Value::Bool(b) => b.to_string(),
        serde_json::Value::Number(n) => {
            n.as_i64().map_or_else(|| format!("{:?}", n.as_f64().unwrap_or_default()), |i| i.to_string())
        }
        serde_json::Value::String(s) => quote(s),
        serde_json::Value::Array(a) => {
            format!("[{}]", a.iter().filter_map(of_json).collect::<Vec<_>>().join(", "))
        }
        serde_json::Value::Object(m) => object(m),
    })
}

fn object(map: &Json) -> String {
    inline(map.iter().filter_map(|(k, v)| Some((k.as_str(), of_json(v)?))))
}

/// An inline table of TOML values.
pub(crate) fn inline<'k>(pairs: impl Iterator<Item = (&'k str, String)>) -> String {
    let pairs: Vec<String> = pairs.map(|(k, v)| format!("{} = {v}", quote_key(k))).collect();
    if pairs.is_empty() { "{}".into() } else { format!("{{ {} }}", pairs.join(", ")) }
}
