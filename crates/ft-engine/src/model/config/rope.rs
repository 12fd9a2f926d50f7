//! Frequencies of the rotary embedding, with the context-extension schemes of transformers.

use super::error::{Error, Result};
use super::keys::Keys;
use super::limits::POSITIONS;
use candle_core::Device;
use ft_kernels::Tensor;
use rayon::prelude::*;
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

/// Key of the context length in pre-training.
const ORIGINAL: &str = "original_max_position_embeddings";

impl Rope {
    /// Reads `rope_theta` with `rope_scaling` (transformers 4), or `rope_parameters` (transformers 5).
    ///
    /// If a config has both, for example after an override, `rope_scaling` wins.
    pub fn parse(keys: &Keys<'_>, default_theta: f64, max_positions: usize, dim: usize) -> Result<Self> {
        let parameters = keys.table("rope_parameters")?;
        if let Some(p) = &parameters {
            for nested in LAYER_TYPES {
                if p.table(nested).is_ok_and(|t| t.is_some()) {
                    let why = format!("{nested}: this family has no parameters by layer type");
                    return Err(keys.bad("rope_parameters", why));
                }
            }
        }
        let theta = match &parameters {
            Some(p) => p.number("rope_theta", THETA)?.or(keys.number("rope_theta", THETA)?),
            None => keys.number("rope_theta", THETA)?,
        }
        .unwrap_or(default_theta);
        let scaling = match keys.table("rope_scaling")?.or(parameters) {
            None => Scaling::Default,
            Some(t) if LONG.contains(&kind_of(&t)?) => Self::long(keys, &t, max_positions, dim)?,
            Some(t) => match Self::scaling(&t, max_positions)? {
                Scaling::Proportional { .. } => {
                    return Err(t.bad("rope_type", "proportional; built with parameters by layer type"));
                }
                scaling => scaling,
            },
        };
        Ok(Self { theta, scaling, dim })
    }

    /// Reads the embeddings of full and of sliding layers, in this order: `rope_parameters` by layer type
    /// (transformers 5), or `rope_theta` with `rope_scaling`, and `rope_local_base_freq`.
    pub fn parse_by_type(
        keys: &Keys<'_>,
        [full, sliding]: [f64; 2],
        max_positions: usize,
        [full_dim, sliding_dim]: [usize; 2],
    ) -> Result<Vec<Self>> {
        let Some(p) = keys.table("rope_parameters")? else {
            let theta = keys.number("rope_local_base_freq", THETA)?.unwrap_or(sliding);
            let local = Self { theta, scaling: Scaling::Default, dim: sliding_dim };
            return Ok(vec![Self::parse(keys, full, max_positions, full_dim)?, local]);
        };
        let of = |key: &str, theta: f64, dim: usize| -> Result<Self> {
            let Some(t) = p.table(key)? else {
                return Err(p.bad(key, "missing; a table is wanted for each layer type"));
            };
            let theta = t.number("rope_theta", THETA)?.unwrap_or(theta);
            Ok(Self { theta, scaling: Self::scaling(&t, max_positions)?, dim })
        };
        let [full_type, sliding_type] = LAYER_TYPES;
        Ok(vec![of(full_type, full, full_dim)?, of(sliding_type, sliding, sliding_dim)?])
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

    fn scaling(t: &Keys<'_>, max_positions: usize) -> Result<Scaling> {
        let kind = kind_of(t)?;
        let need = |key: &str| -> Result<f64> {
            match t.number(key, FACTOR)? {
                Some(x) => Ok(x),
                None => Err(t.bad(key, format!("missing; rope_type {kind} needs it"))),
            }
        };
        Ok(match kind {
            "default" => Scaling::Default,
            "linear" => Scaling::Linear { factor: need("factor")? },
            "llama3" => {
                let factor = need("factor")?;
                let (low, high) = (need("low_freq_factor")?, need("high_freq_factor")?);
                let original = need(ORIGINAL)?;
                if high <= low {
                    let why = format!("{high}; more than low_freq_factor {low} is wanted");
                    return Err(t.bad("high_freq_factor", why));
                }
                Scaling::Llama3 { factor, low, high, original }
            }
            "yarn" => Self::yarn(t, need("factor")?, max_positions)?,
            "proportional" => Scaling::Proportional {
                factor: t.number("factor", FACTOR)?.unwrap_or(1.0),
                share: t.number("partial_rotary_factor", 0.0..=1.0)?.unwrap_or(1.0),
            },
            other => {
                let why =
                    format!("{other}; default, linear, llama3, longrope, proportional and yarn are built");
                return Err(t.bad("rope_type", why));
            }
        })
    }

    fn yarn(t: &Keys<'_>, factor: f64, max_positions: usize) -> Result<Scaling> {
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
        let original = t.number(ORIGINAL, FACTOR)?;
        Ok(Scaling::Yarn {
            factor,
            attention: t.number("attention_factor", FACTOR)?.unwrap_or(inferred),
            beta_fast: beta("beta_fast", 32.0)?,
            beta_slow: beta("beta_slow", 1.0)?,
            original: original.unwrap_or(max_positions as f64),
            truncate: t.flag("truncate")?.unwrap_or(true),
        })
    }

    /// LongRoPE as Phi-3 has it: the context length in pre-training stands beside the table.
    fn long(keys: &Keys<'_>, t: &Keys<'_>, max_positions: usize, dim: usize) -> Result<Scaling> {
        let Some(original) = keys.some(ORIGINAL, POSITIONS)? else {
            return Err(keys.bad(ORIGINAL, "missing; rope_type longrope needs it"));
        };
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
