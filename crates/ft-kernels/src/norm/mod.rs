//! RMSNorm: `y = w * x / sqrt(mean(x^2) + eps)` over the last axis
//! (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019).

mod cuda;

use super::blocks::{Values, ghosts, written};
use super::cpu::{ROWS, Real, dot, is_cpu, on_real, tensor, vectorised, view};
use super::ledger::Ledger;
use super::tensor::Ghost;
use crate::Tensor;
use crate::padded::Padded;
use candle_core::Result;

/// Forward.
///
/// # Shapes
/// `x` [.., d], `w` `[d]` -> [.., d] in `x`'s dtype; the mean is taken in f32 (f64 for f64).
pub fn forward(x: &Tensor, w: &Tensor, eps: f64) -> Result<Tensor> {
    if is_cpu(x) {
        on_real!(x.dtype(), forward_cpu(x, w, eps))
    } else {
        cuda::forward(x, None, w, eps, 0)?.1.values()?.reshape(x.shape())
    }
}

/// As [`forward`], of a matrix, on CUDA with room for `rank` columns beside the result.
pub fn forward_padded(x: &Tensor, w: &Tensor, eps: f64, rank: usize) -> Result<Padded> {
    match is_cpu(x) {
        true => Padded::of(&forward(x, w, eps)?),
        false => Ok(cuda::forward(x, None, w, eps, rank)?.1),
    }
}

/// `x + a`, and the norm of it, on CUDA with room for `rank` columns beside it: one pass there.
pub fn forward_add(x: &Tensor, a: Tensor, w: &Tensor, eps: f64, rank: usize) -> Result<(Tensor, Padded)> {
    if is_cpu(x) {
        let sum = (x + a)?;
        let y = forward(&sum, w, eps)?;
        return Ok((sum, Padded::of(&y)?));
    }
    match cuda::forward(x, Some(&a), w, eps, rank)? {
        (Some(sum), y) => Ok((sum, y)),
        (None, _) => candle_core::bail!("norm: no sum"),
    }
}

/// Backward: the gradients of `x` and, if wanted, of `w` (f32; f64 for f64), given that of the output. That of `w` comes
/// as rows [p, d] whose sum it is: one on the CPU, a part a block on CUDA.
///
/// The norm is computed again from `x`: it costs one pass and nothing is kept.
pub fn backward(
    x: &Tensor,
    w: &Tensor,
    eps: f64,
    dy: &Tensor,
    want_dw: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    if is_cpu(x) {
        on_real!(x.dtype(), backward_cpu(x, w, eps, dy, want_dw))
    } else {
        let (dx, dw) = cuda::backward(x, w, eps, dy, None, want_dw, 0)?;
        Ok((dx.values()?.reshape(x.shape())?, dw))
    }
}

/// As [`backward`], of a matrix, with `add` added to the gradient of `x`, and on CUDA room for `rank` columns beside it: one
/// pass there.
pub fn backward_add(
    x: &Tensor,
    w: &Tensor,
    eps: f64,
    dy: &Tensor,
    add: &Padded,
    want_dw: bool,
    rank: usize,
) -> Result<(Padded, Option<Tensor>)> {
    if !is_cpu(x) {
        return cuda::backward(x, w, eps, dy, Some(add), want_dw, rank);
    }
    let (dx, dw) = backward(x, w, eps, dy, want_dw)?;
    Ok((Padded::of(&(add.values()? + dx)?)?, dw))
}

/// The factor on a row. Where its squares overflow, that is NaN and not 0: a model that has grown so large must be
/// noticed, and zeros would pass for numbers.
#[inline(always)]
fn scale<T: Real>(row: &[T], eps: f64) -> T {
    let mean = dot(row, row) / T::of(row.len() as f64) + T::of(eps);
    (mean * T::zero() + T::one()) / mean.sqrt()
}

fn forward_cpu<T: Real>(x: &Tensor, w: &Tensor, eps: f64) -> Result<Tensor> {
    let (d, like) = (w.dim(0)?, (x.shape(), x.dtype()));
    if let Some([y]) = ghosts::<T, 1>(&[x, w], like, d, |_| ()) {
        return Ok(y);
    }
    let (x, w) = (Values::<T>::of(x)?, view::<T>(w)?);
    let ([y], _) = written(like, ROWS * d, |from, out| {
        let mut room = Vec::new();
        out.each(d, |at, [y]| {
            let x = x.read(from + at..from + at + d, &mut room);
            vectorised(|| {
                let r = scale(x, eps);
                for ((y, x), w) in y.iter_mut().zip(x).zip(&*w) {
                    *y = *x * r * *w;
                }
            });
        });
    })?;
    Ok(y)
}

fn backward_cpu<T: Real>(
    x: &Tensor,
    w: &Tensor,
    eps: f64,
    dy: &Tensor,
    want_dw: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let (d, like) = (w.dim(0)?, (x.shape(), x.dtype()));
    let partial = |l: &Ledger| {
        let parts = if want_dw { x.elem_count().div_ceil(ROWS) } else { 0 };
        l.touch((T::DTYPE.size_in_bytes() * parts) as u64);
    };
    if let Some([dx]) = ghosts::<T, 1>(&[x, w, dy], like, d, partial) {
        let ledger = dx.ghost().map(Ghost::ledger);
        let dw = ledger.filter(|_| want_dw).map(|l| Ghost::new(l, (1, d), T::DTYPE).into());
        return Ok((dx, dw));
    }
    let (x, w, dy) = (Values::<T>::of(x)?, view::<T>(w)?, Values::<T>::of(dy)?);
    // one partial sum a block of rows, added in order below: the same bits for any number of threads
    let ([dx], partial) = written(like, ROWS * d, |from, out| {
        let mut dw = vec![T::zero(); if want_dw { d } else { 0 }];
        let (mut gw, mut of_x, mut of_g) = (vec![T::zero(); d], Vec::new(), Vec::new());
        out.each(d, |at, [dx]| {
            let row = || from + at..from + at + d;
            let (x, g) = (x.read(row(), &mut of_x), dy.read(row(), &mut of_g));
            vectorised(|| {
                let r = scale(x, eps);
                for ((gw, g), w) in gw.iter_mut().zip(g).zip(&*w) {
                    *gw = *g * *w;
                }
                let c = dot(&gw, x) * r * r * r / T::of(d as f64);
                for ((dx, gw), x) in dx.iter_mut().zip(&gw).zip(x) {
                    *dx = *gw * r - *x * c;
                }
                for ((dw, g), x) in dw.iter_mut().zip(g).zip(x) {
                    *dw += *g * *x * r;
                }
            });
        });
        dw
    })?;
    if !want_dw {
        return Ok((dx, None));
    }
    let mut sum = vec![T::zero(); d];
    for p in &partial {
        sum.iter_mut().zip(p).for_each(|(s, p)| *s += *p);
    }
    Ok((dx, Some(tensor(sum, (1, d), T::DTYPE)?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, gradient, randn};
    use candle_core::DType;

    #[test]
    fn gradients() -> Result<()> {
        for (seed, shape) in [(1, (3, 8)), (2, (1, 1)), (3, (70, 5))] {
            let (x, w) = (randn(seed, shape, DType::F64)?, randn(seed + 10, shape.1, DType::F64)?);
            let dy = randn(seed + 20, shape, DType::F64)?;
            let (dx, dw) = backward(&x, &w, 0.1, &dy, true)?;
            gradient("x", &x, &dx, &dy, |x| forward(x, &w, 0.1));
            gradient("w", &w, &dw.expect("wanted").flatten_all()?, &dy, |w| forward(&x, w, 0.1));
        }
        Ok(())
    }

    /// Squares that overflow: the row would be zeros, and nothing after it would notice.
    #[test]
    fn what_overflows_is_no_number() -> Result<()> {
        let x = Tensor::new(&[[1f32, 2.0], [1e30, 1.0]], &candle_core::Device::Cpu)?;
        let w = Tensor::ones(2, DType::F32, x.device())?;
        let (dx, dw) = backward(&x, &w, 1e-5, &Tensor::ones((2, 2), DType::F32, x.device())?, true)?;
        for y in [forward(&x, &w, 1e-5)?, dx] {
            let y = y.to_vec2::<f32>()?;
            assert!(y[0].iter().all(|y| y.is_finite()) && y[1].iter().all(|y| y.is_nan()), "{y:?}");
        }
        assert!(dw.expect("wanted").to_vec2::<f32>()?[0].iter().all(|y| y.is_nan()));
        Ok(())
    }

    #[test]
    fn with_an_addition_the_same_bits() -> Result<()> {
        let [x, a, dy] = [1, 2, 3].map(|seed| randn(seed, (40, 24), DType::F32));
        let (x, a, dy, w) = (x?, a?, dy?, randn(4, 24, DType::F32)?);
        let (sum, y) = forward_add(&x, a.clone(), &w, 1e-5, 0)?;
        close(&sum, &(&x + &a)?, 0.0);
        close(&y.values()?, &forward(&sum, &w, 1e-5)?, 0.0);
        let (dx, dw) = backward_add(&sum, &w, 1e-5, &dy, &Padded::of(&a)?, true, 0)?;
        let (own, own_w) = backward(&sum, &w, 1e-5, &dy, true)?;
        close(&dx.values()?, &(own + a)?, 0.0);
        close(&dw.expect("wanted"), &own_w.expect("wanted"), 0.0);
        Ok(())
    }
}
