//! Frequencies of the rotary embedding, with the context-extension schemes of transformers.

use super::error::{Error, Result};
use super::keys::Keys;
use super::limits::POSITIONS;
use candle_core::Device;
use ft_kernels::Tensor;
use rayon::prelude::*;
use serde_json::{Map, Value};
use std::f64::consts::PI;
use std::ops::RangeInclusive;

/// Rotary position embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies (`rope_theta`).
    pub theta: f64,
    pub scaling: Scaling,
    /// Channels of a head that rotate.
    pub dim: usize,
}

/// Names of layer types: full attention, and sliding windows.
pub(super) const LAYER_TYPES: [&str; 2] = ["full_attention", "sliding_attention"];

/// Range of the base: above 1, with powers representable in f32.
const THETA: RangeInclusive<f64> = 1.000_001..=1e15;
/// Range of factors and lengths.
const FACTOR: RangeInclusive<f64> = 1e-6..=1e9;

/// Scaling of the frequencies for longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// No scaling.
    Default,
    /// Positions divided by `factor` (kaiokendev's linear interpolation).
    Linear { factor: f64 },
    /// Frequencies divided by `factor`; only the first `share` of the channel pairs rotates (Gemma 4).
    Proportional { factor: f64, share: f64 },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones unchanged, a smooth blend between.
    Llama3 {
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` are unchanged.
        high: f64,
        /// Context length in pre-training, in tokens.
        original: f64,
    },
    /// YaRN (Peng et al., 2023).
    Yarn {
        factor: f64,
        /// Attention factor: multiplies cosine and sine.
        attention: f64,
        /// Dimensions with more rotations than this are unchanged.
        beta_fast: f64,
        /// Dimensions with fewer rotations than this are divided.
        beta_slow: f64,
        /// Context length in pre-training, in tokens.
        original: f64,
        /// Whether the blended range is rounded outward to whole dimensions.
        truncate: bool,
    },
    /// LongRoPE (Ding et al., 2024): each channel pair's frequency divided by a factor of its own, of one list or the
    /// other by the length of the document.
    Long {
        short: Vec<f32>,
        /// Of documents with more tokens than `original`.
        long: Vec<f32>,
        /// Attention factor: multiplies cosine and sine.
        attention: f64,
        original: usize,
    },
}

/// Table of transformers 4: scaling of the frequencies; in full layers alone if sliding ones have another embedding.
pub(super) const ROPE_SCALING: &str = "rope_scaling";
/// Table of transformers 5: scaling and base; by layer type where layers differ.
pub(super) const ROPE_PARAMETERS: &str = "rope_parameters";
/// Key of the base, in a table or at the top level.
const BASE: &str = "rope_theta";
/// Key of the base in sliding layers.
const LOCAL: &str = "rope_local_base_freq";
/// Key of the context length in pre-training.
const ORIGINAL: &str = "original_max_position_embeddings";
/// Key of the share of a head's channels that rotate.
pub(super) const PARTIAL: &str = "partial_rotary_factor";
/// Key of YaRN's rounding.
const TRUNCATE: &str = "truncate";

/// The table of a family with one embedding. If a config has both tables, [`ROPE_SCALING`] replaces the other, the base
/// included, as in transformers.
pub(super) fn table_of<'a>(keys: &Keys<'a>) -> Result<Option<Keys<'a>>> {
    match keys.table(ROPE_SCALING)?.filter(|t| !t.raw.is_empty()) {
        Some(t) => Ok(Some(t)),
        None => keys.table(ROPE_PARAMETERS),
    }
}

/// Keys of overrides that change tables of the file.
pub(super) const CHANGES: [&str; 4] = [BASE, LOCAL, PARTIAL, ROPE_SCALING];

/// Replaces keys of a text model by overrides. Scaling and bases go into the table in effect, and leave the rest of it;
/// a file with neither table has `default`, that of its class. At the top level, transformers would take another base
/// with the scaling, and ignore the bases.
pub(super) fn replace(
    raw: &mut Map<String, Value>,
    overrides: &Map<String, Value>,
    default: Option<&Map<String, Value>>,
) {
    let own = |key: &str| raw.get(key).and_then(Value::as_object).filter(|t| !t.is_empty()).cloned();
    let (mut before, mut parameters) = (own(ROPE_SCALING), own(ROPE_PARAMETERS));
    raw.extend(overrides.iter().map(|(key, value)| (key.clone(), value.clone())));
    let scaling = overrides.get(ROPE_SCALING);
    if overrides.contains_key(ROPE_PARAMETERS) {
        if scaling.is_none() {
            raw.remove(ROPE_SCALING);
        }
        return;
    }
    let is_table = scaling.is_none_or(Value::is_object);
    if !is_table || !CHANGES.iter().any(|key| overrides.contains_key(*key)) {
        return;
    }
    let (was_scaled, by_class) = (before.is_some(), default.is_some_and(is_by_type));
    if by_class {
        // Not read by classes with such a default, and refused in a file.
        before = before.filter(|_| scaling.is_none());
    }
    if before.is_none() && parameters.is_none() {
        parameters = default.cloned();
    }
    let tables = match parameters {
        Some(p) if is_by_type(&p) && by_class => [before, Some(replaced_by_type(p, None, overrides))],
        Some(p) if is_by_type(&p) => [None, Some(replaced_by_type(p, before, overrides))],
        p => replaced_in_all(before, p, overrides),
    };
    for (key, table) in [ROPE_SCALING, ROPE_PARAMETERS].into_iter().zip(tables) {
        if let Some(table) = table {
            raw.insert(key.into(), table.into());
        } else if key == ROPE_SCALING && (was_scaled || scaling.is_some()) {
            raw.remove(key);
        }
    }
}

/// Whether [`ROPE_PARAMETERS`] has tables by layer type.
fn is_by_type(parameters: &Map<String, Value>) -> bool {
    parameters.get(LAYER_TYPES[0]).is_some_and(Value::is_object)
}

/// [`ROPE_PARAMETERS`] by layer type after overrides, with the file's [`ROPE_SCALING`] in that of full layers.
fn replaced_by_type(
    mut parameters: Map<String, Value>,
    before: Option<Map<String, Value>>,
    overrides: &Map<String, Value>,
) -> Map<String, Value> {
    for (layers, base) in LAYER_TYPES.into_iter().zip([BASE, LOCAL]) {
        let Some(Value::Object(table)) = parameters.get_mut(layers) else { continue };
        if base == BASE {
            table.extend(before.clone().unwrap_or_default());
            rescale(table, overrides);
            table.extend(overrides.get(PARTIAL).map(|share| (PARTIAL.to_string(), share.clone())));
        }
        table.extend(overrides.get(base).map(|base| (BASE.to_string(), base.clone())));
    }
    parameters
}

/// [`ROPE_SCALING`] and [`ROPE_PARAMETERS`] of all layers after overrides: the one in effect, in place of both.
fn replaced_in_all(
    before: Option<Map<String, Value>>,
    parameters: Option<Map<String, Value>>,
    overrides: &Map<String, Value>,
) -> [Option<Map<String, Value>>; 2] {
    let (has_scaling, has_parameters) = (before.is_some(), parameters.is_some());
    let mut table = before.or(parameters).unwrap_or_default();
    rescale(&mut table, overrides);
    if has_parameters || table.contains_key(BASE) {
        table.extend(overrides.get(BASE).map(|base| (BASE.to_string(), base.clone())));
    }
    if table.contains_key(PARTIAL) {
        table.extend(overrides.get(PARTIAL).map(|share| (PARTIAL.to_string(), share.clone())));
    }
    let is_new = !has_scaling && !has_parameters && !table.is_empty();
    [(has_scaling || is_new).then(|| table.clone()), has_parameters.then_some(table)]
}

/// Names of the key of the type, of transformers 5 and 4.
const KINDS: [&str; 2] = ["rope_type", "type"];

/// Puts the scaling of overrides into a table. A scaling with a type replaces the former scaling.
fn rescale(table: &mut Map<String, Value>, overrides: &Map<String, Value>) {
    const UNSCALED: [&str; 4] = [BASE, PARTIAL, "mrope_section", "mrope_interleaved"];
    let Some(scaling) = overrides.get(ROPE_SCALING).and_then(Value::as_object) else { return };
    if KINDS.iter().any(|name| scaling.contains_key(*name)) {
        table.retain(|key, _| UNSCALED.contains(&key.as_str()));
    }
    table.extend(scaling.clone());
}

/// The table of full layers by layer type: [`ROPE_SCALING`] over `full`, and the one of the two that errors name.
fn of_full_layers<'a>(
    keys: &Keys<'a>,
    full: Option<Keys<'a>>,
) -> Result<(Option<Keys<'a>>, Map<String, Value>)> {
    let scaling = keys.table(ROPE_SCALING)?;
    let both = [&full, &scaling].into_iter().flatten().flat_map(|t| t.raw.clone());
    let merged = both.collect();
    Ok((scaling.or(full), merged))
}

impl Rope {
    /// Reads the embedding of all layers: the table, and `rope_theta` in it or at the top level.
    pub fn parse(keys: &Keys<'_>, max_positions: usize, dim: usize) -> Result<Self> {
        let Some(t) = table_of(keys)? else {
            return Ok(Self { theta: keys.required(BASE, THETA)?, scaling: Scaling::Default, dim });
        };
        for nested in LAYER_TYPES {
            if t.table(nested).is_ok_and(|t| t.is_some()) {
                return Err(t.bad(nested, "this family has no parameters by layer type"));
            }
        }
        let theta = theta(&t, keys, BASE)?;
        if LONG.contains(&kind_of(&t)?) {
            return Ok(Self { theta, scaling: Self::long(keys, &t, max_positions, dim)?, dim });
        }
        let truncate = t.flag(TRUNCATE)?.unwrap_or(true);
        let lengths = Lengths { positions: max_positions, original: keys.number(ORIGINAL, FACTOR)? };
        let scaling = Self::scaling(&t, lengths, truncate)?;
        if let Scaling::Proportional { .. } = scaling {
            return Err(t.bad("rope_type", "proportional; built with parameters by layer type"));
        }
        Ok(Self { theta, scaling, dim })
    }

    /// Reads the embeddings of full and of sliding layers, in this order: `rope_parameters` by layer type
    /// (transformers 5), `rope_scaling` over those of full layers, `rope_theta` and `rope_local_base_freq`.
    pub fn parse_by_type(
        keys: &Keys<'_>,
        max_positions: usize,
        [full_dim, sliding_dim]: [usize; 2],
    ) -> Result<Vec<Self>> {
        let parameters = keys.table(ROPE_PARAMETERS)?;
        let of = |key: &str| -> Result<Option<Keys<'_>>> {
            let Some(p) = &parameters else { return Ok(None) };
            match p.table(key)? {
                None => Err(p.bad(key, "missing; a table is wanted for each layer type")),
                table => Ok(table),
            }
        };
        let [full_type, sliding_type] = LAYER_TYPES;
        let (full, sliding) = (of(full_type)?, of(sliding_type)?);
        let (named, merged) = of_full_layers(keys, full)?;
        let full = named.as_ref().unwrap_or(keys).over(&merged);
        // transformers reads `truncate` beside the layer types, not in them.
        let truncate = parameters.as_ref().map_or(Ok(None), |p| p.flag(TRUNCATE))?.unwrap_or(true);
        let read = |t: &Keys<'_>, base: &str, dim: usize| -> Result<Self> {
            let lengths = Lengths { positions: max_positions, original: None };
            let (theta, scaling) = (theta(t, keys, base)?, Self::scaling(t, lengths, truncate)?);
            let share = t.number(PARTIAL, 0.0..=1.0)?.filter(|share| *share != 1.0);
            // Classes ignore a share without scaling, and fail on one with a scaling of all channels.
            let takes = matches!(scaling, Scaling::Default | Scaling::Proportional { .. });
            if let (Some(share), false) = (share, takes) {
                let kind = kind_of(t)?;
                let why = format!("{share}; 1 is wanted with rope_type {kind}, which rotates all channels");
                return Err(t.bad(PARTIAL, why));
            }
            Ok(Self { theta, scaling, dim })
        };
        let none = Map::new();
        let sliding = sliding.unwrap_or_else(|| keys.over(&none));
        Ok(vec![read(&full, BASE, full_dim)?, read(&sliding, LOCAL, sliding_dim)?])
    }

    /// Longest context covered by the scaling, given `max_position_embeddings`. Some configs state the
    /// extended context there, some the original one; the larger is returned.
    pub fn reach(&self, positions: usize) -> usize {
        let scaled = match self.scaling {
            Scaling::Default | Scaling::Long { .. } => 0.0,
            Scaling::Linear { factor } | Scaling::Proportional { factor, .. } => factor * positions as f64,
            Scaling::Llama3 { factor, original, .. } | Scaling::Yarn { factor, original, .. } => {
                factor * original
            }
        };
        positions.max(scaled as usize)
    }

    fn scaling(t: &Keys<'_>, lengths: Lengths, truncate: bool) -> Result<Scaling> {
        let kind = kind_of(t)?;
        let need = |key: &str| -> Result<f64> {
            match t.number(key, FACTOR)? {
                Some(x) => Ok(x),
                None => Err(t.bad(key, format!("missing; rope_type {kind} needs it"))),
            }
        };
        Ok(match kind {
            "default" => match t.number("factor", FACTOR)?.filter(|factor| *factor != 1.0) {
                None => Scaling::Default,
                Some(factor) => return Err(t.bad("factor", format!("{factor}; it needs a rope_type"))),
            },
            "linear" => Scaling::Linear { factor: need("factor")? },
            "llama3" => {
                let factor = need("factor")?;
                let (low, high) = (need("low_freq_factor")?, need("high_freq_factor")?);
                let original = lengths.original_of(t)?;
                if high <= low {
                    let why = format!("{high}; more than low_freq_factor {low} is wanted");
                    return Err(t.bad("high_freq_factor", why));
                }
                Scaling::Llama3 { factor, low, high, original }
            }
            "yarn" => {
                let original = lengths.original_of(t)?;
                let factor = match t.number("factor", FACTOR)? {
                    None if t.raw.contains_key("factor") => lengths.positions as f64 / original,
                    _ => need("factor")?,
                };
                Self::yarn(t, (factor, original), truncate)?
            }
            "proportional" => Scaling::Proportional {
                factor: t.number("factor", FACTOR)?.unwrap_or(1.0),
                share: t.number(PARTIAL, 0.0..=1.0)?.unwrap_or(1.0),
            },
            other => {
                let why =
                    format!("{other}; default, linear, llama3, longrope, proportional and yarn are built");
                return Err(t.bad("rope_type", why));
            }
        })
    }

    fn yarn(t: &Keys<'_>, (factor, original): (f64, f64), truncate: bool) -> Result<Scaling> {
        let mscale = |scale: f64, m: f64| if scale <= 1.0 { 1.0 } else { 0.1 * m * scale.ln() + 1.0 };
        let scales = 0.0..=1e3;
        let inferred = match (t.number("mscale", scales.clone())?, t.number("mscale_all_dim", scales)?) {
            (Some(a), Some(b)) if a != 0.0 && b != 0.0 => mscale(factor, a) / mscale(factor, b),
            _ => mscale(factor, 1.0),
        };
        let beta = |key: &str, default: f64| -> Result<f64> {
            // transformers treats 0 as the default.
            Ok(t.number(key, 0.0..=1e9)?.filter(|b| *b > 0.0).unwrap_or(default))
        };
        Ok(Scaling::Yarn {
            factor,
            attention: t.number("attention_factor", FACTOR)?.unwrap_or(inferred),
            beta_fast: beta("beta_fast", 32.0)?,
            beta_slow: beta("beta_slow", 1.0)?,
            original,
            truncate,
        })
    }

    /// LongRoPE as Phi-3 has it.
    fn long(keys: &Keys<'_>, t: &Keys<'_>, max_positions: usize, dim: usize) -> Result<Scaling> {
        let (top, own) = (keys.some(ORIGINAL, POSITIONS)?, t.some(ORIGINAL, POSITIONS)?);
        let original = top.or(own).unwrap_or(max_positions);
        let list = |key: &str| -> Result<Vec<f32>> {
            let own = t.get(key).and_then(|v| serde_json::from_value::<Vec<f32>>(v.clone()).ok());
            let fits = |f: &f32| FACTOR.contains(&f64::from(*f));
            match own.filter(|l| l.len() == dim / 2 && l.iter().all(fits)) {
                Some(list) => Ok(list),
                None => {
                    Err(t.bad(key, format!("a list of {} factors is wanted, one for two channels", dim / 2)))
                }
            }
        };
        let stated = t.number("factor", FACTOR)?;
        let factor = stated.unwrap_or(max_positions as f64 / original as f64);
        let inferred = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
        let attention = t.number("attention_factor", FACTOR)?.unwrap_or(inferred);
        Ok(Scaling::Long { short: list("short_factor")?, long: list("long_factor")?, attention, original })
    }

    /// Tokens of the longest document with the frequencies of shorter ones, if longer ones have others.
    pub fn turn(&self) -> Option<usize> {
        match self.scaling {
            Scaling::Long { original, .. } => Some(original),
            _ => None,
        }
    }

    /// Inverse frequencies of the `dim / 2` channel pairs in a document of `tokens`, and the attention factor on cosine
    /// and sine.
    fn frequencies_of(&self, tokens: usize) -> (Vec<f32>, f32) {
        let Scaling::Long { short, long, attention, original } = &self.scaling else {
            return self.frequencies();
        };
        let factors = if tokens > *original { long } else { short };
        let of =
            |(i, f): (usize, &f32)| 1.0 / (f * (self.theta as f32).powf((2 * i) as f32 / self.dim as f32));
        (factors.iter().enumerate().map(of).collect(), *attention as f32)
    }

    /// Inverse frequencies of the `dim / 2` channel pairs, and the attention factor on cosine and sine; of documents
    /// within the context length in pre-training, if longer ones have others.
    ///
    /// Follows the arithmetic of transformers, including its use of f32, so that angles match to the last
    /// bit.
    pub fn frequencies(&self) -> (Vec<f32>, f32) {
        let (dim, half) = (self.dim, self.dim / 2);
        if let Scaling::Long { original, .. } = &self.scaling {
            return self.frequencies_of(*original);
        }
        let plain: Vec<f32> =
            (0..half).map(|i| 1.0 / (self.theta as f32).powf((2 * i) as f32 / dim as f32)).collect();
        match self.scaling {
            Scaling::Default => (plain, 1.0),
            Scaling::Linear { factor } => (plain.iter().map(|f| f / factor as f32).collect(), 1.0),
            Scaling::Proportional { factor, share } => {
                let rotated = (share * dim as f64) as usize / 2;
                let of = |(i, f): (usize, &f32)| if i < rotated { f / factor as f32 } else { 0.0 };
                (plain.iter().enumerate().map(of).collect(), 1.0)
            }
            Scaling::Llama3 { factor, low, high, original } => {
                let scaled = |f: f32| -> f32 {
                    let wave = 2.0 * PI / f64::from(f);
                    if wave < original / high {
                        f
                    } else if wave > original / low {
                        f / factor as f32
                    } else {
                        let smooth = ((original / wave - low) / (high - low)) as f32;
                        (1.0 - smooth) * f / factor as f32 + smooth * f
                    }
                };
                (plain.into_iter().map(scaled).collect(), 1.0)
            }
            Scaling::Yarn { factor, attention, beta_fast, beta_slow, original, truncate } => {
                let at = |rotations: f64| {
                    dim as f64 * (original / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (at(beta_fast), at(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let mix = |(i, f): (usize, f32)| -> f32 {
                    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0) as f32;
                    f / factor as f32 * ramp + f * (1.0 - ramp)
                };
                (plain.into_iter().enumerate().map(mix).collect(), attention as f32)
            }
            // As above.
            Scaling::Long { attention, .. } => (plain, attention as f32),
        }
    }

    /// Cosine and sine tables `[t, dim / 2]` (f32) for token positions in documents of these lengths, end to end; the
    /// last positions, if there are fewer than tokens.
    pub fn tables(&self, positions: &[u32], docs: &[usize], device: &Device) -> Result<(Tensor, Tensor)> {
        let [cos, sin] = self.values(positions, docs);
        let make = |v| Tensor::from_vec(v, (positions.len(), self.dim / 2), device).map_err(Error::from);
        Ok((make(cos)?, make(sin)?))
    }

    /// Host values of [`Rope::tables`].
    pub fn values(&self, positions: &[u32], docs: &[usize]) -> [Vec<f32>; 2] {
        let [near, far] = [0, usize::MAX].map(|tokens| self.frequencies_of(tokens));
        let past = docs.iter().sum::<usize>().saturating_sub(positions.len());
        let turn = self.turn().unwrap_or(usize::MAX);
        let is_far = docs.iter().flat_map(|n| std::iter::repeat_n(*n > turn, *n)).skip(past);
        let is_far = is_far.chain(std::iter::repeat(false));
        let rows: Vec<(u32, bool)> = positions.iter().copied().zip(is_far).collect();
        let half = near.0.len().max(1);
        let [mut cos, mut sin] = [(); 2].map(|()| vec![0.0; rows.len() * near.0.len()]);
        let all = (cos.par_chunks_mut(half), sin.par_chunks_mut(half), &rows).into_par_iter();
        all.with_min_len(ROWS).for_each(|(cos, sin, (p, is_far))| {
            let (freq, factor) = if *is_far { &far } else { &near };
            for ((cos, sin), f) in cos.iter_mut().zip(sin).zip(freq) {
                let (s, c) = (*p as f32 * f).sin_cos();
                (*cos, *sin) = (c * factor, s * factor);
            }
        });
        [cos, sin]
    }
}

/// Context lengths at the top level.
#[derive(Clone, Copy)]
struct Lengths {
    /// `max_position_embeddings`.
    positions: usize,
    /// Length in pre-training; it takes precedence over the table's.
    original: Option<f64>,
}

impl Lengths {
    /// Context length in pre-training.
    fn original_of(self, t: &Keys<'_>) -> Result<f64> {
        let own = t.number(ORIGINAL, FACTOR)?;
        Ok(self.original.or(own).unwrap_or(self.positions as f64))
    }
}

/// The base in a table, or else the key `top` at the top level.
fn theta(t: &Keys<'_>, keys: &Keys<'_>, top: &str) -> Result<f64> {
    match t.number(BASE, THETA)? {
        Some(theta) => Ok(theta),
        None => keys.required(top, THETA),
    }
}

/// Positions of a task of [`Rope::values`].
const ROWS: usize = 64;

/// Names of LongRoPE.
const LONG: [&str; 2] = ["longrope", "su"];

/// Name of the scaling in a table.
fn kind_of<'a>(t: &Keys<'a>) -> Result<&'a str> {
    Ok(match t.string("rope_type")? {
        Some(kind) => kind,
        None => t.string("type")?.unwrap_or("default"),
    })
}
