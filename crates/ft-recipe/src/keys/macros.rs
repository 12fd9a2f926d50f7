//! The `table!` macro, which defines a recipe key by one entry: field, type, documentation, kind and
//! default. It generates the struct, the key table for checks and schema, and conversions from checked
//! values and to TOML. The `words!` macro defines an enum of words.

/// Strips the leading space of a doc comment.
pub(crate) const fn doc(text: &'static str) -> &'static str {
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
            pub(crate) const KEYS: &'static [Key] = &[$(Key {
                name: table!(@name $field $($spelt)?),
                kind: $kind,
                default: $default,
                doc: doc(concat!($($doc),+)),
            }),+];

            /// Converts checked values to the struct.
            pub(crate) fn read(section: &Section) -> Self {
                Self {
                    $($field: Field::read(section.values.get(table!(@name $field $($spelt)?))),)+
                    $($($other: Default::default(),)+)?
                }
            }

            /// The keys with values as TOML.
            pub(crate) fn write(&self) -> Keys {
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

            fn write(&self) -> Formatted {
                Formatted::Table(self.write())
            }
        }

        impl Field for Vec<$name> {
            fn read(checked: Option<&Checked>) -> Self {
                match checked {
                    Some(Checked::Tables(sections)) => sections.iter().map($name::read).collect(),
                    _ => Vec::new(),
                }
            }

            fn write(&self) -> Formatted {
                if self.is_empty() {
                    return Formatted::Value("[]".into());
                }
                Formatted::Tables(self.iter().map($name::write).collect())
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

            fn write(&self) -> Formatted {
                Formatted::Value(quote(self.word()))
            }
        }
    };
}

pub(super) use {table, words};
