//! The `table!` macro, which defines a recipe key by one entry: field, type, documentation, kind and
//! default. It generates the struct, the key table for checks and schema, and conversions from checked
//! values and to TOML.

use super::check::Checked;
use super::kind::Kind;
use super::tree::{quote, quote_key};
use super::types::{IndexSet, LayerSet, MicroRows, Offload, OneDevice, Recompute, Token};
use super::values::written_bytes;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A free table of a recipe, such as `model.override`.
pub type Json = serde_json::Map<String, serde_json::Value>;

/// The value of a key, formatted for the resolved recipe.
#[derive(Debug)]
pub(super) enum Written {
    /// No value.
    Nothing,
    /// TOML text.
    Value(String),
    /// A table.
    Table(Keys),
    /// A list of tables.
    Tables(Vec<Keys>),
}

impl Written {
    /// Formats the value for a key of this kind: sizes get a unit.
    pub fn of(self, kind: Kind) -> Self {
        match (kind, self) {
            (Kind::Bytes, Written::Value(v)) => Written::Value(v.parse().map_or(v, written_bytes)),
            (_, written) => written,
        }
    }
}

/// The keys of a table in documentation order, with values.
pub(super) type Keys = Vec<(&'static str, Written)>;

/// The type of a key's value.
pub(super) trait Field: Sized {
    /// Converts a checked value. Without one, or after a reported problem, returns the type's default.
    fn read(checked: Option<&Checked>) -> Self;

    /// Formats the value as TOML that parses to an equal value.
    fn write(&self) -> Written;
}

/// Strips the leading space of a doc comment.
pub(super) const fn doc(text: &'static str) -> &'static str {
    match text.split_at_checked(1) {
        Some((_, rest)) => rest,
        None => text,
    }
}

/// Defines a table of keys; see the module documentation. Fields after `..` are not keys.
macro_rules! table {
    (
        #[doc = $about:literal]
        pub struct $name:ident {
            $(
                $(#[doc = $doc:literal])+
                $field:ident $(as $spelt:literal)?: $type:ty = $kind:expr, $default:expr;
            )+
            $(.. $($(#[$meta:meta])* $vis:vis $other:ident: $other_type:ty,)+)?
        }
    ) => {
        #[doc = $about]
        #[derive(Clone, Debug)]
        pub struct $name {
            $($(#[doc = $doc])+ pub $field: $type,)+
            $($($(#[$meta])* $vis $other: $other_type,)+)?
        }

        impl $name {
            /// The key table.
            pub(super) const KEYS: &'static [Key] = &[$(Key {
                name: table!(@name $field $($spelt)?),
                kind: $kind,
                default: $default,
                doc: doc(concat!($($doc),+)),
            }),+];

            /// Converts checked values to the struct.
            pub(super) fn read(section: &Section) -> Self {
                Self {
                    $($field: Field::read(section.values.get(table!(@name $field $($spelt)?))),)+
                    $($($other: Default::default(),)+)?
                }
            }

            /// The keys with values as TOML.
            pub(super) fn write(&self) -> Keys {
                vec![$((table!(@name $field $($spelt)?), Field::write(&self.$field).of($kind))),+]
            }
        }

        impl Field for $name {
            fn read(checked: Option<&Checked>) -> Self {
                match checked {
                    Some(Checked::Table(section)) => Self::read(section),
                    _ => Self::read(&Section::default()),
                }
            }

            fn write(&self) -> Written {
                Written::Table(self.write())
            }
        }

        impl Field for Vec<$name> {
            fn read(checked: Option<&Checked>) -> Self {
                match checked {
                    Some(Checked::Tables(sections)) => sections.iter().map($name::read).collect(),
                    _ => Vec::new(),
                }
            }

            fn write(&self) -> Written {
                match self.is_empty() {
                    true => Written::Value("[]".into()),
                    false => Written::Tables(self.iter().map($name::write).collect()),
                }
            }
        }
    };
    (@name $field:ident $spelt:literal) => { $spelt };
    (@name $field:ident) => { stringify!($field) };
}

/// Defines an enum of a key's words, with spelling, documentation and order. The first word replaces an
/// invalid one, which has been reported already.
macro_rules! words {
    (
        $(#[$meta:meta])*
        pub enum $name:ident {
            #[doc = $first_doc:literal] $first:ident = $first_word:literal,
            $(#[doc = $doc:literal] $variant:ident = $word:literal,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            #[doc = $first_doc] $first,
            $(#[doc = $doc] $variant,)*
        }

        impl $name {
            /// All words with documentation, in documentation order.
            pub const WORDS: &'static [(&'static str, &'static str)] =
                &[($first_word, doc($first_doc)), $(($word, doc($doc))),*];

            /// Parses a word.
            pub fn from_word(word: &str) -> Option<Self> {
                match word {
                    $first_word => Some(Self::$first),
                    $($word => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// The word as spelled in a recipe.
            pub fn word(self) -> &'static str {
                match self {
                    Self::$first => $first_word,
                    $(Self::$variant => $word,)*
                }
            }
        }

        impl Field for $name {
            fn read(checked: Option<&Checked>) -> Self {
                Self::from_word(&String::read(checked)).unwrap_or(Self::$first)
            }

            fn write(&self) -> Written {
                Written::Value(quote(self.word()))
            }
        }
    };
}

pub(super) use {table, words};

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

            fn write(&self) -> Written {
                let $own = self;
                Written::Value($write)
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
    Vec<String>: Texts(list) => list.clone(), list => list_of(list.iter().map(|s| s.as_str()));
    Vec<Offload>: Texts(list) => list.iter().filter_map(|w| Offload::from_word(w)).collect(),
        list => list_of(list.iter().map(|o| o.word()));
    Vec<OneDevice>: Texts(list) => list.iter().filter_map(|w| OneDevice::from_word(w)).collect(),
        list => format!("[{}]", list.iter().map(|d| quote(&d.word())).collect::<Vec<_>>().join(", "));
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

    fn write(&self) -> Written {
        self.as_ref().map_or(Written::Nothing, T::write)
    }
}

impl Field for Option<LayerSet> {
    fn read(checked: Option<&Checked>) -> Self {
        match checked {
            Some(Checked::Layers(set)) => set.clone(),
            _ => None,
        }
    }

    fn write(&self) -> Written {
        Written::Value(match self {
            None => quote("all"),
            Some(LayerSet::Last(n)) => quote(&format!("-{n}:")),
            Some(LayerSet::Indices(set)) => indices(set),
        })
    }
}

impl Field for MicroRows {
    fn read(checked: Option<&Checked>) -> Self {
        match checked {
            Some(Checked::Auto) => MicroRows::Auto,
            other => MicroRows::Rows(Option::<usize>::read(other).unwrap_or(1)),
        }
    }

    fn write(&self) -> Written {
        match self {
            MicroRows::Auto => Written::Value(quote("auto")),
            MicroRows::Rows(n) => n.write(),
        }
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

fn list_of<'s>(words: impl Iterator<Item = &'s str>) -> String {
    format!("[{}]", words.map(quote).collect::<Vec<_>>().join(", "))
}

fn json(value: &serde_json::Value) -> String {
    match value {
        // TOML has no null, so values parsed from TOML never contain one.
        serde_json::Value::Null => "\"\"".into(),
        serde_json::Value::Bool(b) => b.to_string(),
        serde_json::Value::Number(n) if n.is_f64() => format!("{:?}", n.as_f64().unwrap_or_default()),
        serde_json::Value::Number(n) => n.to_string(),
        serde_json::Value::String(s) => quote(s),
        serde_json::Value::Array(a) => format!("[{}]", a.iter().map(json).collect::<Vec<_>>().join(", ")),
        serde_json::Value::Object(m) => object(m),
    }
}

fn object(map: &Json) -> String {
    inline(map.iter().map(|(k, v)| (k.as_str(), json(v))))
}

fn inline<'k>(pairs: impl Iterator<Item = (&'k str, String)>) -> String {
    let pairs: Vec<String> = pairs.map(|(k, v)| format!("{} = {v}", quote_key(k))).collect();
    if pairs.is_empty() { "{}".into() } else { format!("{{ {} }}", pairs.join(", ")) }
}
