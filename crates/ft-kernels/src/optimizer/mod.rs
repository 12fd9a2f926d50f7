//! AdamW on flat buffers, with f32 or 8-bit moments, and sums of squares for the gradient norm.
//!
//! The update matches PyTorch (`torch.optim.AdamW`, Loshchilov and Hutter 2019):
//! `p -= lr wd p; m += (g - m)(1 - b1); v = b2 v + (1 - b2) g^2;`
//! `p -= lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)`.

mod cuda;
mod eight_bit;
#[cfg(all(test, target_arch = "x86_64"))]
mod host_tests;
mod rounding;

pub use eight_bit::{BLOCK, EightBit, SMALLEST, ZERO, adamw8bit, adamw8bit_rounded, maps};
pub use rounding::{Draws, round};

use super::cast::narrow;
use super::cpu::{in_place, is_cpu, vectorised, view};
use crate::Tensor;
use candle_core::{DType, Result};
use half::bf16;
use rayon::prelude::*;
use rounding::{Stored, on_stored};

/// Elements per task. Constant, to fix the order of sums.
const CHUNK: usize = 16 * 1024;

/// Values rounded at once on the CPU.
pub const PIECE: usize = 16 << 20;

/// Hyperparameters of one update.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay rates of the moments.
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Update number, starting at 1.
    pub t: u64,
    /// Factor on the gradient (clipping).
    pub grad_scale: f64,
}

impl AdamW {
    fn lr_over_bias(&self) -> f64 {
        self.lr / (1.0 - self.betas[0].powf(self.t as f64))
    }
    fn sqrt_bias2(&self) -> f64 {
        (1.0 - self.betas[1].powf(self.t as f64)).sqrt()
    }
}

/// Updates master weights `p` and moments `m`, `v` from the gradient `g`, all f32 `[n]`, in place. If
/// given, `copy` `[n]` receives the new weights in its own dtype. On CUDA this is a single pass without
/// extra memory, and also zeroes the gradient.
pub fn adamw(p: &Tensor, m: &Tensor, v: &Tensor, g: &Tensor, copy: Option<&Tensor>, k: &AdamW) -> Result<()> {
    if !is_cpu(p) {
        return cuda::adamw([p, m, v, g], copy, k);
    }
    let [halves, other] = [true, false].map(|is| copy.filter(|c| (c.dtype() == DType::BF16) == is));
    adamw_cpu::<f32>(p, [m, v, g], halves, Draws::NONE, k)?;
    put_copy(p, other)
}

/// [`adamw`] for 16-bit weights `p` without an f32 master copy: computes the update in f32 and rounds it
/// stochastically.
pub fn adamw_rounded(p: &Tensor, [m, v, g]: [&Tensor; 3], draws: Draws, k: &AdamW) -> Result<()> {
    if !is_cpu(p) {
        return cuda::adamw_rounded([p, m, v, g], draws, k);
    }
    on_stored!(p, adamw_cpu(p, [m, v, g], None, draws, k))
}

/// Copies the new weights to `copy`, if given.
fn put_copy(p: &Tensor, copy: Option<&Tensor>) -> Result<()> {
    let Some(copy) = copy else { return Ok(()) };
    by_pieces(p.elem_count(), PIECE, &|start, len| {
        copy.slice_set(&p.narrow(0, start, len)?.to_dtype(copy.dtype())?, 0, start)
    })
}

/// A single fused pass, since updates are memory-bound.
fn adamw_cpu<T: Stored>(
    p: &Tensor,
    [m, v, g]: [&Tensor; 3],
    copy: Option<&Tensor>,
    draws: Draws,
    k: &AdamW,
) -> Result<()> {
    const NAME: &str = "adamw";
    if p.ghost().is_some() {
        return Ok(());
    }
    let g = view::<f32>(g)?;
    in_place::<f32>(NAME, m, |m| {
        in_place::<f32>(NAME, v, |v| {
            in_place::<T>(NAME, p, |p| match copy {
                None => {
                    pass(p, [m, v], &g, &mut [], draws, k);
                    Ok(())
                }
                Some(copy) => in_place::<bf16>(NAME, copy, |copy| {
                    pass(p, [m, v], &g, copy, draws, k);
                    Ok(())
                }),
            })
        })
    })
}

/// Updates a chunk of values and, if not empty, of the rounded copy.
fn pass<T: Stored>(
    p: &mut [T],
    [m, v]: [&mut [f32]; 2],
    g: &[f32],
    copy: &mut [bf16],
    draws: Draws,
    k: &AdamW,
) {
    let gs = k.grad_scale as f32;
    let (b1, b2) = ((1.0 - k.betas[0]) as f32, k.betas[1] as f32);
    let c2 = (1.0 - k.betas[1]) as f32;
    let decay = (1.0 - k.lr * k.weight_decay) as f32;
    let (step, root, eps) = (k.lr_over_bias() as f32, k.sqrt_bias2() as f32, k.eps as f32);
    let mut copies = copy.chunks_mut(CHUNK);
    let copies: Vec<&mut [bf16]> = g.chunks(CHUNK).map(|_| copies.next().unwrap_or_default()).collect();
    let moments = m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK));
    let values = p.par_chunks_mut(CHUNK).zip(g.par_chunks(CHUNK)).zip(copies);
    values.zip(moments).enumerate().for_each(|(c, (((p, g), copy), (m, v)))| {
        let mut words = draws.from(c * CHUNK);
        vectorised(|| {
            for ((p, g), (m, v)) in p.iter_mut().zip(g).zip(m.iter_mut().zip(v)) {
                let g = *g * gs;
                *m += (g - *m) * b1;
                *v = *v * b2 + c2 * g * g;
                *p = T::of(p.widen() * decay - step * (*m / (v.sqrt() / root + eps)), &mut words);
            }
            copy.iter_mut().zip(p).for_each(|(c, p)| *c = narrow(p.widen()));
        });
    });
}

/// Calls `f` with the start and length of each piece of `n` values.
pub fn by_pieces(n: usize, piece: usize, f: &dyn Fn(usize, usize) -> Result<()>) -> Result<()> {
    (0..n).step_by(piece.max(1)).try_for_each(|start| f(start, piece.max(1).min(n - start)))
}

/// Sum of squares over flat f32 buffers, in f64. On CUDA, one synchronization copies one number to the
/// host.
pub fn sum_squares(buffers: &[Tensor]) -> Result<f64> {
    let mut sum = 0.0;
    for b in buffers.iter().filter(|b| is_cpu(b)) {
        let x = view::<f32>(b)?;
        let parts: Vec<f64> = x.par_chunks(CHUNK).map(|c| vectorised(|| squares(c))).collect();
        sum += parts.iter().sum::<f64>();
    }
    let elsewhere: Vec<&Tensor> = buffers.iter().filter(|b| !is_cpu(b)).collect();
    Ok(sum + if elsewhere.is_empty() { 0.0 } else { Squares(cuda::squares(&elsewhere)?).read()? })
}

/// Sum of squares, with independent lanes.
#[inline(always)]
fn squares(x: &[f32]) -> f64 {
    let mut lanes = [0f64; 16];
    let chunks = x.chunks_exact(16);
    let tail: f64 = chunks.remainder().iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    for c in chunks {
        for i in 0..16 {
            lanes[i] += f64::from(c[i]) * f64::from(c[i]);
        }
    }
    lanes.into_iter().sum::<f64>() + tail
}

/// Sum of squares of a flat f32 buffer at the time of the call, read lazily from CUDA.
#[derive(Debug)]
pub struct Squares(Tensor);

impl Squares {
    /// Launches the sum over `buffer`.
    ///
    /// # Errors
    /// Device failure.
    pub fn of(buffer: &Tensor) -> Result<Self> {
        Ok(Self(match is_cpu(buffer) {
            true => Tensor::new(&[sum_squares(std::slice::from_ref(buffer))?], &candle_core::Device::Cpu)?,
            false => cuda::squares(&[buffer])?,
        }))
    }

    /// Waits for the sum.
    ///
    /// # Errors
    /// Device failure.
    pub fn read(&self) -> Result<f64> {
        self.0.real()?.to_device(&candle_core::Device::Cpu)?.squeeze(0)?.to_scalar()
    }
}

/// 16-bit values widened at once by [`finite`].
const LOOK: usize = 1 << 20;

/// Whether all values of a contiguous float tensor are finite.
pub fn finite(x: &Tensor) -> Result<bool> {
    if x.dtype() != DType::F32 {
        let (x, mut all) = (x.flatten_all()?, true);
        for start in (0..x.elem_count()).step_by(LOOK) {
            let piece = x.narrow(0, start, LOOK.min(x.elem_count() - start))?;
            all = all && finite(&piece.to_dtype(DType::F32)?)?;
        }
        return Ok(all);
    }
    if is_cpu(x) {
        let x = view::<f32>(x)?;
        return Ok(x.par_chunks(CHUNK).all(|c| c.iter().all(|x| x.is_finite())));
    }
    // squares of finite f32 values never overflow in f64
    Ok(sum_squares(&[x.flatten_all()?])?.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, randn};
    use candle_core::Device;

    /// Three steps of torch.optim.AdamW (2.11) on p = [1, -2, 3], g = [0.1 k, -0.2, 0.3 / k], lr 0.1,
    /// betas 0.9 0.99, eps 1e-8, weight decay 0.05.
    #[test]
    fn steps_of_pytorch() -> Result<()> {
        let d = &Device::Cpu;
        let (p, m, v) = (
            Tensor::new(&[1f32, -2., 3.], d)?,
            Tensor::zeros(3, DType::F32, d)?,
            Tensor::zeros(3, DType::F32, d)?,
        );
        for t in 1..=3u64 {
            let k = t as f32;
            let g = Tensor::new(&[0.1 * k, -0.2, 0.3 / k], d)?;
            let step =
                AdamW { lr: 0.1, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.05, t, grad_scale: 1.0 };
            adamw(&p, &m, &v, &g, None, &step)?;
        }
        let want = Tensor::new(TORCH, d)?;
        close(&p, &want, 1e-6);
        Ok(())
    }
    const TORCH: &[f32] = &[0.694_613_4, -1.671_647_2, 2.675_769];

    /// The copy holds the new weights, rounded once, and does not affect the update.
    #[test]
    fn the_copy_is_the_rounded_weights() -> Result<()> {
        let make = || -> Result<[Tensor; 4]> {
            let [p, m, v, g] = [1, 2, 3, 4].map(|seed| randn(seed, 50, DType::F32));
            Ok([p?, m?, v?.sqr()?, g?])
        };
        let ([p, m, v, g], [cp, cm, cv, _]) = (make()?, make()?);
        let k = AdamW { lr: 1e-2, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.1, t: 5, grad_scale: 0.3 };
        let copy = Tensor::zeros(50, DType::BF16, &Device::Cpu)?;
        adamw(&p, &m, &v, &g, None, &k)?;
        adamw(&cp, &cm, &cv, &g, Some(&copy), &k)?;
        for (a, b) in [(&cp, &p), (&cm, &m), (&cv, &v)] {
            assert_eq!(a.to_vec1::<f32>()?, b.to_vec1::<f32>()?);
        }
        close(&copy, &p.to_dtype(DType::BF16)?, 0.0);
        Ok(())
    }

    /// Updates of 16-bit weights equal those of f32 weights with the same initial values, rounded with
    /// the same random words; also with 8-bit moments.
    #[test]
    fn weights_of_16_bits_are_updated_in_f32() -> Result<()> {
        let (n, d) = (CHUNK + 700, &Device::Cpu);
        for dtype in [DType::BF16, DType::F16] {
            let [m, v, g] = [2, 3, 4].map(|seed| randn(seed, n, DType::F32));
            let (m, v, g) = (m?, v?.sqr()?, g?);
            let p = randn(1, n, DType::F32)?.to_dtype(dtype)?;
            let wide = p.to_dtype(DType::F32)?;
            let (own, draws) = ([m.force_contiguous()?, v.force_contiguous()?], Draws::new(5, 2, 1, 512));
            let k =
                AdamW { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.1, t: 2, grad_scale: 0.3 };
            adamw(&wide, &m, &v, &g, None, &k)?;
            adamw_rounded(&p, [&own[0], &own[1], &g], draws, &k)?;
            let want = Tensor::zeros(n, dtype, d)?;
            round(&wide, &want, draws)?;
            close(&p, &want, 0.0);
            close(&own[0], &m, 0.0);
            close(&own[1], &v, 0.0);

            let eight_bit = || -> Result<EightBit> {
                let codes = |zero: u8| candle_core::Tensor::full(zero, n, d).map(Tensor::Real);
                let scales = || Tensor::zeros(n.div_ceil(BLOCK), DType::F32, d);
                let (codes, scales) = ([codes(ZERO[0])?, codes(ZERO[1])?], [scales()?, scales()?]);
                Ok(EightBit { codes, scales, maps: maps(d)? })
            };
            let (a, b) = (eight_bit()?, eight_bit()?);
            let p = randn(1, n, DType::F32)?.to_dtype(dtype)?;
            let wide = p.to_dtype(DType::F32)?;
            adamw8bit(&wide, &a, &g, None, &k)?;
            adamw8bit_rounded(&p, &b, &g, draws, &k)?;
            round(&wide, &want, draws)?;
            close(&p, &want, 0.0);
            close(&a.scales[1], &b.scales[1], 0.0);
        }
        Ok(())
    }

    #[test]
    fn sums_of_squares_and_what_is_not_finite() -> Result<()> {
        let (g, p) = (randn(4, 50, DType::F32)?, randn(1, 50, DType::F32)?);
        let n = sum_squares(&[g.clone(), p.clone()])?;
        let want = g.sqr()?.sum_all()?.to_scalar::<f32>()? + p.sqr()?.sum_all()?.to_scalar::<f32>()?;
        assert!((n - f64::from(want)).abs() < 1e-4);
        assert!(finite(&g)?);
        let infinite = Tensor::new(&[1f32, f32::INFINITY], &Device::Cpu)?;
        assert!(!finite(&infinite)? && !finite(&infinite.to_dtype(DType::BF16)?)?);
        assert!(finite(&g.to_dtype(DType::BF16)?)?);
        Ok(())
    }
}
