//! What the row of a key says, and what a key can take.

/// One key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Its name in the table that it belongs to.
    pub name: &'static str,
    /// What it takes.
    pub kind: Kind,
    /// What it is when the recipe does not say.
    pub default: Unset,
    /// What it means, in a sentence or two.
    pub doc: &'static str,
}

/// What a key is when the recipe does not say.
#[derive(Debug, Clone, Copy)]
pub enum Unset {
    /// It must be given.
    Required,
    /// This value, as TOML.
    Toml(&'static str),
    /// No value; what happens instead, in words.
    Absent(&'static str),
}

/// What a key takes.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// A whole number from the first to the second.
    Int(u64, u64),
    /// As `Int`, or `"auto"`.
    IntOrAuto(u64, u64),
    /// A finite number.
    Number(Bound),
    /// `true` or `false`.
    Bool,
    /// A string that is not empty.
    Text,
    /// A string that can name a folder.
    Name,
    /// One of these words: (word, meaning).
    Word(&'static [(&'static str, &'static str)]),
    /// A list of these words, each at most once.
    Words(&'static [(&'static str, &'static str)]),
    /// A table of anything that JSON can hold.
    Anything,
    /// A table of strings.
    Strings,
    /// The list of `train.modules`.
    Modules,
    /// `train.tokens`.
    Tokens,
    /// `train.layers`.
    Layers,
    /// `train.experts`.
    Experts,
    /// Two numbers in [0, 1).
    Betas,
    /// A number of bytes, such as `"48GiB"`.
    Bytes,
    /// `memory.recompute`.
    Recompute,
    /// A list of devices, each at most once.
    Devices,
    /// A table with these keys.
    Table(&'static [Key]),
    /// A list of tables with these keys.
    Tables(&'static [Key]),
}

/// The range of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// Above 0.
    Positive,
    /// 0 or above.
    NotNegative,
    /// 0 to 1, both included.
    Share,
    /// 0 to 1, without 1.
    BelowOne,
    /// 1e-9 to 1e9: what is computed with it stays within f32, and adapters hold it.
    Alpha,
}

impl Bound {
    /// Whether `x` is finite and within.
    pub fn holds(self, x: f64) -> bool {
        x.is_finite()
            && match self {
                Bound::Positive => x > 0.0,
                Bound::NotNegative => x >= 0.0,
                Bound::Share => (0.0..=1.0).contains(&x),
                Bound::BelowOne => (0.0..1.0).contains(&x),
                Bound::Alpha => (1e-9..=1e9).contains(&x),
            }
    }

    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Bound::Positive => "a number above 0",
            Bound::NotNegative => "a number of 0 or more",
            Bound::Share => "a number from 0 to 1",
            Bound::BelowOne => "a number from 0 to below 1",
            Bound::Alpha => "a number from 1e-9 to 1e9",
        }
    }
}

/// The groups of `train.modules`, with what each holds.
pub const GROUPS: &[(&str, &str)] = &[
    ("attention", "the projections q, k, v, o"),
    ("mlp", "dense and shared-expert linears"),
    ("experts", "the linears of routed experts"),
    ("router", "the routers of mixture layers"),
    ("norms", "every norm, q and k norms too"),
    ("embedding", "the token embedding"),
    ("head", "the output head"),
    (TOKENS, "the rows of tokens in the embedding and in a head of its own, in a rule by itself"),
];

/// The word of `train.modules` for rows of single tokens.
pub const TOKENS: &str = "new_tokens";

/// A bound on indices of layers and experts, on LoRA's rank, and on ranks of a run.
pub const INDEX: u64 = 65_535;

/// Calls `f` with the dotted path of every key, lists of tables as `train.0`.
pub fn each(f: &mut dyn FnMut(&str, &'static Key)) {
    walk(super::Recipe::KEYS, "", f);
}

fn walk(keys: &'static [Key], prefix: &str, f: &mut dyn FnMut(&str, &'static Key)) {
    for k in keys {
        let path = super::tree::join(prefix, k.name);
        f(&path, k);
        match k.kind {
            Kind::Table(inner) => walk(inner, &path, f),
            Kind::Tables(inner) => walk(inner, &format!("{path}.0"), f),
            _ => {}
        }
    }
}
