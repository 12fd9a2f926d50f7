//! Stochastic rounding to 16 bits: up or down at random, with the exact value as the mean (Gupta et al.,
//! "Deep learning with limited numerical precision", 2015).
//!
//! Without f32 master weights, round-to-nearest loses every update below half the spacing of the weight's
//! dtype: nearly all updates at fine-tuning learning rates. The random numbers depend only on seed, step,
//! unit and index, so all ranks round a weight identically.

use super::{CHUNK, cuda};
use crate::Tensor;
use crate::cpu::{Value, in_place, is_cpu, view};
use candle_core::{DType, Result};
use ft_base::rng::{Purpose, Stream};
use half::{bf16, f16};
use rayon::prelude::*;

/// Random words for rounding: word `first + i` of the stream rounds value i.
#[derive(Clone, Copy, Debug)]
pub struct Draws {
    pub(super) stream: Stream,
    pub(super) first: u64,
}

impl Draws {
    /// Placeholder if nothing is rounded.
    pub(super) const NONE: Self = Self { stream: Stream::NONE, first: 0 };

    /// The words of update `update` (from 1) for the values of a unit's buffer from index `first` on.
    pub fn new(seed: u64, update: u64, unit: usize, first: usize) -> Self {
        Self { stream: Stream::new(seed, Purpose::Rounding, update, unit as u64), first: first as u64 }
    }

    /// The words from value `at` on.
    pub(super) fn from(&self, at: usize) -> Words {
        Words { stream: self.stream, next: self.first + at as u64, block: None }
    }
}

/// Sequential reader of a stream's words.
pub(super) struct Words {
    stream: Stream,
    next: u64,
    block: Option<[u32; 4]>,
}

impl Words {
    #[inline]
    fn take(&mut self) -> u32 {
        let at = (self.next % 4) as usize;
        if at == 0 {
            self.block = None;
        }
        let block = *self.block.get_or_insert_with(|| self.stream.block(self.next / 4));
        self.next += 1;
        block[at]
    }
}

/// Storage dtype of weights.
pub(super) trait Stored: Value {
    /// Exact value in f32.
    fn widen(self) -> f32;
    /// Converts a new value; stochastic if the dtype is narrower than f32.
    fn of(x: f32, words: &mut Words) -> Self;
}

impl Stored for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn of(x: f32, _: &mut Words) -> Self {
        x
    }
}

impl Stored for bf16 {
    #[inline]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    /// The low 16 bits of an f32 are the fraction, in 1/65536, of the way to the next bf16 away from
    /// zero.
    #[inline]
    fn of(x: f32, words: &mut Words) -> Self {
        let word = words.take();
        if !x.is_finite() {
            return bf16::from_f32(x);
        }
        bf16::from_bits(((x.to_bits() + (word >> 16)) >> 16) as u16)
    }
}

impl Stored for f16 {
    #[inline]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline]
    fn of(x: f32, words: &mut Words) -> Self {
        const SMALLEST_NORMAL: f32 = 1.0 / 16_384.0;
        const STEPS: f32 = 16_777_216.0;
        let (word, size) = (words.take(), x.abs());
        if !x.is_finite() {
            return f16::from_f32(x);
        }
        if size >= SMALLEST_NORMAL {
            return f16::from_f32(f32::from_bits((x.to_bits() + (word >> 19)) & !0x1fff));
        }
        // values below the normal range have a spacing of 2^-24
        let (steps, low) = (size * STEPS, (size * STEPS).floor());
        let up = ft_base::rng::unit(word) < steps - low;
        f16::from_f32(((low + f32::from(u8::from(up))) / STEPS).copysign(x))
    }
}

/// Calls `$f::<T>(..)` for a tensor's 16-bit dtype.
macro_rules! on_stored {
    ($t:expr, $f:ident($($arg:expr),* $(,)?)) => {
        match $t.dtype() {
            candle_core::DType::BF16 => $f::<half::bf16>($($arg),*),
            candle_core::DType::F16 => $f::<half::f16>($($arg),*),
            other => candle_core::bail!("weights without f32 copies in {other:?}"),
        }
    };
}
pub(super) use on_stored;

/// Rounds f32 values `[n]` stochastically into `to` `[n]` of 16 bits.
///
/// # Errors
/// Other dtypes or lengths, or a device failure.
pub fn round(values: &Tensor, to: &Tensor, draws: Draws) -> Result<()> {
    if values.dtype() != DType::F32 || values.elem_count() != to.elem_count() {
        candle_core::bail!("{:?} {:?} rounded to {:?}", values.shape(), values.dtype(), to.shape());
    }
    if !is_cpu(to) {
        return cuda::round(values, to, draws);
    }
    if to.ghost().is_some() {
        return Ok(());
    }
    on_stored!(to, round_cpu(values, to, draws))
}

fn round_cpu<T: Stored>(values: &Tensor, to: &Tensor, draws: Draws) -> Result<()> {
    let values = view::<f32>(values)?;
    in_place::<T>("round", to, |to| {
        let chunks = to.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK)).enumerate();
        chunks.for_each(|(c, (to, values))| {
            let mut words = draws.from(c * CHUNK);
            to.iter_mut().zip(values).for_each(|(to, x)| *to = T::of(*x, &mut words));
        });
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{randn, values};
    use candle_core::Device;

    /// The adjacent 16-bit values below and above a number, and its relative position between them, in
    /// exact arithmetic.
    fn between(x: f32, all: &[f64]) -> (f64, f64, f64) {
        let at = all.partition_point(|v| *v <= f64::from(x));
        let (low, high) = (all[at - 1], all[at.min(all.len() - 1)]);
        (low, high, if high > low { (f64::from(x) - low) / (high - low) } else { 0.0 })
    }

    /// All finite values of a dtype in ascending order.
    fn every(of: impl Fn(u16) -> f64) -> Vec<f64> {
        let mut all: Vec<f64> = (0..=u16::MAX).map(of).filter(|v| v.is_finite()).collect();
        all.sort_by(f64::total_cmp);
        all.dedup();
        all
    }

    /// Results are one of the two adjacent values, and over all words (only the upper 16 bits matter) the
    /// mean equals the input exactly.
    #[test]
    fn the_mean_over_all_words_is_the_number() {
        let bf16s = every(|b| bf16::from_bits(b).to_f64());
        let f16s = every(|b| f16::from_bits(b).to_f64());
        let (mut numbers, mut word) = (Vec::new(), Stream::new(3, Purpose::Test, 0, 0));
        for exponent in [-140, -127, -30, -24, -20, -15, -14, -13, -1, 0, 1, 9, 15] {
            for i in 0..3u64 {
                numbers.push((1.0 + word.uniform(i)) * 2f32.powi(exponent) * if i == 1 { -1.0 } else { 1.0 });
            }
            word = Stream::new(3, Purpose::Test, 0, exponent.unsigned_abs().into());
        }
        numbers.extend([0.0, 1.0, -0.5]);
        for x in numbers {
            let exact = |draw: &dyn Fn(u32) -> f64, all: &[f64], bits: u32| {
                let (low, high, share) = between(x, all);
                let mut ups = 0u64;
                for w in 0..1u32 << 16 {
                    // low bits of a word have no effect beyond 1/65536
                    let got = draw(w << 16 | 0x8000 & bits);
                    assert!(got == low || got == high, "{x:e}: {got:e}, not {low:e} or {high:e}");
                    ups += u64::from(got == high && high > low);
                }
                let off = (ups as f64 / 65_536.0 - share).abs();
                assert!(off <= 1.0 / 65_536.0, "{x:e}: up {ups} of 65536 times, should be {share}");
            };
            exact(&|w| bf16::of(x, &mut one(w)).to_f64(), &bf16s, 0);
            exact(&|w| f16::of(x, &mut one(w)).to_f64(), &f16s, 0x8000);
        }
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (b, h) = (bf16::of(x, &mut one(u32::MAX)), f16::of(x, &mut one(u32::MAX)));
            assert!(b.to_f32().total_cmp(&x).is_eq() && h.to_f32().total_cmp(&x).is_eq(), "{x}");
        }
    }

    /// A source of identical words.
    fn one(word: u32) -> Words {
        Words { stream: Stream::new(0, Purpose::Test, 0, 0), next: 1, block: Some([word; 4]) }
    }

    /// Updates far below the spacing of the dtype take effect on average; with round-to-nearest no weight
    /// moves.
    #[test]
    fn small_updates_arrive_on_average() -> Result<()> {
        let (n, steps, lr) = (1 << 16, 20, 1e-6);
        let d = &Device::Cpu;
        let start = (&randn(1, n, DType::F32)? * 0.02)?.to_dtype(DType::BF16)?;
        let (p, nearest) = (start.force_contiguous()?, start.force_contiguous()?);
        let state = || Tensor::zeros(n, DType::F32, d);
        let (m, v, g) = (state()?, state()?, candle_core::Tensor::ones(n, DType::F32, d)?.into());
        for t in 1..=steps {
            let k = super::super::AdamW {
                lr,
                betas: [0.9, 0.99],
                eps: 1e-8,
                weight_decay: 0.0,
                t,
                grad_scale: 1.0,
            };
            super::super::adamw_rounded(&p, [&m, &v, &g], Draws::new(1, t, 0, 0), &k)?;
            let down = (nearest.to_dtype(DType::F32)?.real()? - lr)?.to_dtype(DType::BF16)?;
            nearest.slice_set(&down.into(), 0, 0)?;
        }
        let moved = |p: &Tensor| -> (f64, f64) {
            let apart: Vec<f64> = values(p).iter().zip(values(&start)).map(|(a, b)| a - b).collect();
            let still = apart.iter().filter(|x| **x == 0.0).count() as f64 / n as f64;
            (apart.iter().sum::<f64>() / n as f64, still)
        };
        let want = -lr * steps as f64;
        let ((mean, _), (stuck, still)) = (moved(&p), moved(&nearest));
        // the error per weight and step has a standard deviation of at most half the largest spacing,
        // 2.4e-4
        let bound = 4.0 * 2.4e-4 * (steps as f64 / n as f64).sqrt();
        assert!((mean - want).abs() < bound.min(0.5 * want.abs()), "{mean:e} {want:e}");
        assert!(still > 0.9 && stuck.abs() < 0.1 * want.abs(), "{stuck:e} {still}");
        Ok(())
    }

    /// Each value uses its own word, independent of the start of a call and the number of threads.
    #[test]
    fn pieces_and_threads_change_no_bit() -> Result<()> {
        let n = 2 * CHUNK + 37;
        let x = randn(1, n, DType::F32)?;
        for dtype in [DType::BF16, DType::F16] {
            let rounded = |pieces: &[usize], threads: usize| -> Result<Vec<f64>> {
                let to = Tensor::zeros(n, dtype, &Device::Cpu)?;
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                pool.map_err(candle_core::Error::wrap)?.install(|| {
                    let mut at = 0;
                    for len in pieces {
                        let draws = Draws::new(7, 3, 2, 256 + at);
                        round(&x.narrow(0, at, *len)?, &to.narrow(0, at, *len)?, draws)?;
                        at += len;
                    }
                    Ok::<(), candle_core::Error>(())
                })?;
                Ok(values(&to))
            };
            let want = rounded(&[n], 1)?;
            assert_eq!(rounded(&[n], 3)?, want);
            assert_eq!(rounded(&[1, 255, CHUNK, n - 256 - CHUNK], 2)?, want);
            // differs from round-to-nearest
            let nearest = values(&x.to_dtype(dtype)?);
            let moved = want.iter().zip(&nearest).filter(|(a, b)| a != b).count();
            assert!((n / 5..n / 3).contains(&moved), "{moved} of {n}");
        }
        Ok(())
    }
}
