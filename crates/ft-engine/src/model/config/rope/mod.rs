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
    /// NTK scaling by length (bloc97, emozilla): a larger base for each document of more than `positions` tokens.
    Dynamic { factor: f64, positions: usize },
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
    /// LongRoPE (Ding et al., 2024): the frequency of a channel pair divided by its factor, from one of two lists by
    /// the length of the document.
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
            Scaling::Linear { factor }
            | Scaling::Proportional { factor, .. }
            | Scaling::Dynamic { factor, .. } => factor * positions as f64,
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
            Scaling::Dynamic { positions, .. } => Some(positions),
            _ => None,
        }
    }

    /// A length for all documents with the frequencies of one of `tokens`: 0 up to [`Rope::turn`].
    pub fn length_class(&self, tokens: usize) -> usize {
        match (self.turn().is_some_and(|turn| tokens > turn), &self.scaling) {
            (false, _) => 0,
            (true, Scaling::Dynamic { .. }) => tokens,
            (true, _) => usize::MAX,
        }
    }

    /// Inverse frequencies of the `dim / 2` channel pairs, and the attention factor on cosine and sine; of documents
    /// within the context length in pre-training, if longer ones have others.
    pub fn frequencies(&self) -> (Vec<f32>, f32) {
        self.frequencies_of(0)
    }

    /// Frequencies of [`Rope::frequencies`] in a document of `tokens`.
    ///
    /// Follows the arithmetic of transformers, f32 included, for angles equal to the last bit.
    fn frequencies_of(&self, tokens: usize) -> (Vec<f32>, f32) {
        let (dim, half) = (self.dim, self.dim / 2);
        let theta = self.theta as f32 * self.growth(tokens);
        let power = |i: usize| theta.powf((2 * i) as f32 / dim as f32);
        let plain: Vec<f32> = (0..half).map(|i| 1.0 / power(i)).collect();
        match self.scaling {
            Scaling::Default | Scaling::Dynamic { .. } => (plain, 1.0),
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

    /// Factor on the base in a document of `tokens`.
    fn growth(&self, tokens: usize) -> f32 {
        match self.scaling {
            Scaling::Dynamic { factor, positions } if tokens > positions => {
                let longer = factor as f32 * tokens as f32 / positions as f32 - (factor - 1.0) as f32;
                longer.powf((self.dim as f64 / (self.dim as f64 - 2.0)) as f32)
            }
            _ => 1.0,
        }
    }

    /// Tables for token positions in documents of these lengths, end to end; the last positions, if fewer than tokens.
    pub fn tables(&self, positions: &[u32], docs: &[usize], device: &Device) -> Result<Tables> {
        let make = |v| Tensor::from_vec(v, (positions.len(), self.dim / 2), device);
        let [cos, sin] = self.values(positions, docs).map(make);
        Ok(Tables { cos: cos?, sin: sin? })
    }

    /// Host values of [`Rope::tables`].
    pub fn values(&self, positions: &[u32], docs: &[usize]) -> [Vec<f32>; 2] {
        let mut lengths: Vec<usize> = docs.iter().chain([&0]).map(|n| self.length_class(*n)).collect();
        lengths.sort_unstable();
        lengths.dedup();
        let sets: Vec<(Vec<f32>, f32)> = lengths.iter().map(|n| self.frequencies_of(*n)).collect();
        let set = |n: &usize| lengths.partition_point(|of| *of < self.length_class(*n));
        let past = docs.iter().sum::<usize>().saturating_sub(positions.len());
        let of_rows = docs.iter().flat_map(|n| std::iter::repeat_n(set(n), *n)).skip(past);
        let rows: Vec<(u32, usize)> =
            positions.iter().copied().zip(of_rows.chain(std::iter::repeat(0))).collect();
        let half = (self.dim / 2).max(1);
        let [mut cos, mut sin] = [(); 2].map(|()| vec![0.0; rows.len() * (self.dim / 2)]);
        let all = (cos.par_chunks_mut(half), sin.par_chunks_mut(half), &rows).into_par_iter();
        all.with_min_len(ROWS).for_each(|(cos, sin, (p, set))| {
            let (freq, factor) = &sets[*set];
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
