//! The description of a key: name, kind, default and documentation.

/// One key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Name within the enclosing table.
    pub name: &'static str,
    /// Accepted values.
    pub kind: Kind,
    /// Value of an absent key.
    pub default: Unset,
    /// Documentation in one or two sentences.
    pub doc: &'static str,
}

/// Value of a key absent from the recipe.
#[derive(Debug, Clone, Copy)]
pub enum Unset {
    /// The key is required.
    Required,
    /// A default value, as TOML.
    Toml(&'static str),
    /// No value. The text describes the default behavior.
    Absent(&'static str),
}

/// The values accepted by a key.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// An integer in an inclusive range.
    Int(u64, u64),
    /// Like `Int`, or `"auto"`.
    IntOrAuto(u64, u64),
    /// A number of steps in an inclusive range, or a string of [`Interval`](super::Interval).
    Every(u64, u64),
    /// A finite number in a range.
    Number(Bound),
    /// `true` or `false`.
    Bool,
    /// A non-empty string.
    Text,
    /// A string usable as a folder name.
    Name,
    /// One of these words, as (word, meaning).
    Word(&'static [(&'static str, &'static str)]),
    /// A list of distinct words, as (word, meaning).
    Words(&'static [(&'static str, &'static str)]),
    /// A free table, converted to JSON.
    Anything,
    /// A table of strings.
    Strings,
    /// A list of distinct non-empty strings.
    Texts,
    /// The list of `train.modules`.
    Modules,
    /// `train.tokens`.
    Tokens,
    /// `train.layers`.
    Layers,
    /// `train.experts`.
    Experts,
    /// A list of integers from 1.
    Counts,
    /// Two numbers in [0, 1).
    Betas,
    /// A size in bytes, such as `"48GiB"`.
    Bytes,
    /// `memory.recompute`.
    Recompute,
    /// A list of distinct devices.
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
    /// 0 to 1, inclusive.
    Share,
    /// At least 0 and below 1.
    BelowOne,
    /// 1e-9 to 1e9, so that derived scales fit in f32 and in adapter files.
    Alpha,
}

impl Bound {
    /// Whether `x` is finite and in range.
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

    /// Description for messages.
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

/// The groups of `train.modules`, with descriptions.
pub const GROUPS: &[(&str, &str)] = &[
    ("attention", "the projections q, k, v, o, and those of linear attention"),
    ("mlp", "dense and shared-expert linears"),
    ("experts", "the linears of routed experts"),
    ("router", "the routers of mixture layers"),
    ("norms", "every norm, q and k norms too"),
    ("recurrence", "convolution, decay and its bias of linear attention, in full with the whole model"),
    ("per_layer", "tables, linears and norms of per-layer inputs"),
    ("sinks", "attention's sinks, in full with the whole model"),
    ("router_scales", "factors on the inputs of routers and on gates, in full with the whole model"),
    ("embedding", "the token embedding"),
    ("head", "the output head"),
    (TOKENS, "the rows of tokens in the embedding and in a head of its own, in a rule by itself"),
];

/// The entry of `train.modules` for training rows of single tokens.
pub const TOKENS: &str = "new_tokens";

/// Upper bound on layer and expert indices, on the LoRA rank, and on the number of ranks.
pub const INDEX: u64 = 65_535;
