//! Frequencies of the rotary embedding, with the context-extension schemes of transformers.

mod read;
mod tables;

pub(super) use read::{read, unread};
pub(super) use tables::{LAYER_TYPES, ROPE_PARAMETERS, ROPE_SCALING, is_changed, refuse, replace, settle};

use candle_core::{Device, Result};
use ft_kernels::Tensor;
use rayon::prelude::*;
use std::f64::consts::PI;

/// Rotary position embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies (`rope_theta`).
    pub theta: f64,
    pub scaling: Scaling,
    /// Channels of a head that rotate.
    pub dim: usize,
}

/// Tables of a rotary embedding for the tokens of a micro-batch.
#[derive(Clone, Debug)]
pub struct Tables {
    /// Cosines `[t, c / 2]`, f32.
    pub cos: Tensor,
    /// Sines `[t, c / 2]`, f32.
    pub sin: Tensor,
}

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

impl Rope {
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

    /// Tokens of the longest document with the frequencies of shorter ones, if longer ones have others.
    pub fn turn(&self) -> Option<usize> {
        match self.scaling {
            Scaling::Long { original, .. } => Some(original),
            _ => None,
        }
    }

    /// Inverse frequencies of the `dim / 2` channel pairs, and the attention factor on cosine and sine; of documents
    /// within the context length in pre-training, if longer ones have others.
    pub fn frequencies(&self) -> (Vec<f32>, f32) {
        self.frequencies_of(0)
    }

    /// Frequencies of [`Rope::frequencies`] in a document of `tokens`.
    ///
    /// Follows the arithmetic of transformers, including its use of f32, so that angles match to the last
    /// bit.
    fn frequencies_of(&self, tokens: usize) -> (Vec<f32>, f32) {
        let (dim, half) = (self.dim, self.dim / 2);
        let power = |i: usize| (self.theta as f32).powf((2 * i) as f32 / dim as f32);
        let plain: Vec<f32> = (0..half).map(|i| 1.0 / power(i)).collect();
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
            Scaling::Long { ref short, ref long, attention, original } => {
                let factors = if tokens > original { long } else { short };
                let of = |(i, f): (usize, &f32)| 1.0 / (f * power(i));
                (factors.iter().enumerate().map(of).collect(), attention as f32)
            }
        }
    }

    /// Tables for token positions in documents of these lengths, end to end; the last positions, if there are fewer
    /// than tokens.
    pub fn tables(&self, positions: &[u32], docs: &[usize], device: &Device) -> Result<Tables> {
        let make = |v| Tensor::from_vec(v, (positions.len(), self.dim / 2), device);
        let [cos, sin] = self.values(positions, docs).map(make);
        Ok(Tables { cos: cos?, sin: sin? })
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
