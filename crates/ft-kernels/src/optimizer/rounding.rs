//! Stochastic rounding to 16 bits: up or down at random, with the exact value as the mean (Gupta et al.,
//! "Deep learning with limited numerical precision", 2015).
//!
//! Without f32 master weights, round-to-nearest loses every update below half the spacing of the weight's
//! dtype: nearly all updates at fine-tuning learning rates. The random numbers depend only on seed, step,
//! unit and index, so all ranks round a weight identically.

use super::cuda;
use super::draws::{Draws, Stored, on_stored};
use super::settings::CHUNK;
use crate::Tensor;
use crate::cpu::{each, in_place, is_cpu, view};
use candle_core::{DType, Result};

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
        each(to.chunks_mut(CHUNK).zip(values.chunks(CHUNK)).enumerate(), |(c, (to, values))| {
            let mut words = draws.from(c * CHUNK);
            to.iter_mut().zip(values).for_each(|(to, x)| *to = T::of(*x, &mut words));
        });
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::super::draws::Words;
    use super::*;
    use crate::check::{on, randn, values};
    use candle_core::Device;
    use ft_base::rng::{Purpose, Stream};
    use half::{bf16, f16};

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
                on(threads, || {
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
