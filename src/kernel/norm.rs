//! RMSNorm: `y = w * x / sqrt(mean(x^2) + eps)` over the last axis
//! (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019).

use super::cpu::{ROWS, Real, dot, ghosts, is_cpu, on_real, tensor, view};
use super::ledger::Ledger;
use crate::kernel::Tensor;
use crate::kernel::upcast;
use candle_core::{D, Result};
use rayon::prelude::*;

/// Forward.
///
/// # Shapes
/// `x` [.., d], `w` `[d]` -> [.., d] in `x`'s dtype; the mean is taken in f32 (f64 for f64).
pub fn forward(x: &Tensor, w: &Tensor, eps: f64) -> Result<Tensor> {
    if is_cpu(x) { on_real!(x.dtype(), forward_cpu(x, w, eps)) } else { forward_composed(x, w, eps) }
}

/// Backward: the gradients of `x` and, if wanted, of `w` (f32; f64 for f64), given that of the output.
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
        backward_composed(x, w, eps, dy, want_dw)
    }
}

/// The factor on a row. Where its squares overflow, that is NaN and not 0: a model that has grown so large must be
/// noticed, and zeros would pass for numbers.
fn scale<T: Real>(row: &[T], eps: f64) -> T {
    let mean = dot(row, row) / T::of(row.len() as f64) + T::of(eps);
    (mean * T::zero() + T::one()) / mean.sqrt()
}

fn forward_cpu<T: Real>(x: &Tensor, w: &Tensor, eps: f64) -> Result<Tensor> {
    if let Some([y]) = ghosts::<T, 1>(&[x, w], [(x.shape().clone(), x.dtype())], |_| ()) {
        return Ok(y);
    }
    let d = w.dim(0)?;
    let (xv, wv) = (view::<T>(x)?, view::<T>(w)?);
    let wv = &*wv;
    let mut y = vec![T::zero(); xv.len()];
    y.par_chunks_mut(ROWS * d).zip(xv.par_chunks(ROWS * d)).for_each(|(y, x)| {
        for (y, x) in y.chunks_mut(d).zip(x.chunks(d)) {
            let r = scale(x, eps);
            for ((y, x), w) in y.iter_mut().zip(x).zip(wv) {
                *y = *x * r * *w;
            }
        }
    });
    tensor(y, x.shape(), x.dtype())
}

fn backward_cpu<T: Real>(
    x: &Tensor,
    w: &Tensor,
    eps: f64,
    dy: &Tensor,
    want_dw: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let d = w.dim(0)?;
    let partial = |l: &Ledger| l.touch((T::DTYPE.size_in_bytes() * x.elem_count().div_ceil(ROWS)) as u64);
    let (own, of_w) = ((x.shape().clone(), x.dtype()), (d.into(), T::DTYPE));
    if want_dw {
        if let Some([dx, dw]) = ghosts::<T, 2>(&[x, w, dy], [own, of_w], partial) {
            return Ok((dx, Some(dw)));
        }
    } else if let Some([dx]) = ghosts::<T, 1>(&[x, w, dy], [own], |_| ()) {
        return Ok((dx, None));
    }
    let (xv, wv, gv) = (view::<T>(x)?, view::<T>(w)?, view::<T>(dy)?);
    let wv = &*wv;
    let mut dx = vec![T::zero(); xv.len()];
    // one partial sum a block of rows, added in order below: the same bits for any number of threads
    let partial: Vec<Vec<T>> = dx
        .par_chunks_mut(ROWS * d)
        .zip(xv.par_chunks(ROWS * d).zip(gv.par_chunks(ROWS * d)))
        .map(|(dx, (x, g))| {
            let mut dw = vec![T::zero(); if want_dw { d } else { 0 }];
            let mut gw = vec![T::zero(); d];
            for (dx, (x, g)) in dx.chunks_mut(d).zip(x.chunks(d).zip(g.chunks(d))) {
                let r = scale(x, eps);
                for ((gw, g), w) in gw.iter_mut().zip(g).zip(wv) {
                    *gw = *g * *w;
                }
                let c = dot(&gw, x) * r * r * r / T::of(d as f64);
                for ((dx, gw), x) in dx.iter_mut().zip(&gw).zip(x) {
                    *dx = *gw * r - *x * c;
                }
                for ((dw, g), x) in dw.iter_mut().zip(g).zip(x) {
                    *dw += *g * *x * r;
                }
            }
            dw
        })
        .collect();
    let dw = if want_dw {
        let mut sum = vec![T::zero(); d];
        for p in &partial {
            sum.iter_mut().zip(p).for_each(|(s, p)| *s += *p);
        }
        Some(tensor(sum, d, T::DTYPE)?)
    } else {
        None
    };
    Ok((tensor(dx, x.shape(), x.dtype())?, dw))
}

fn normalised(x: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let mean = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?;
    // as on the CPU: NaN where it overflows
    let r = (mean.affine(0.0, 1.0)? / mean.sqrt()?)?;
    Ok((x.broadcast_mul(&r)?, r))
}

fn forward_composed(x: &Tensor, w: &Tensor, eps: f64) -> Result<Tensor> {
    let (n, _) = normalised(&upcast(x)?, eps)?;
    n.broadcast_mul(&upcast(w)?)?.to_dtype(x.dtype())
}

fn backward_composed(
    x: &Tensor,
    w: &Tensor,
    eps: f64,
    dy: &Tensor,
    want_dw: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let (xhat, r) = normalised(&upcast(x)?, eps)?;
    let g = upcast(dy)?;
    let gw = g.broadcast_mul(&upcast(w)?)?;
    let c = (&gw * &xhat)?.mean_keepdim(D::Minus1)?;
    let dx = (gw - xhat.broadcast_mul(&c)?)?.broadcast_mul(&r)?.to_dtype(x.dtype())?;
    let d = w.dim(0)?;
    let dw = if want_dw { Some((g * xhat)?.reshape(((), d))?.sum(0)?) } else { None };
    Ok((dx, dw))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::check::{close, gradient, randn};
    use candle_core::DType;

    #[test]
    fn gradients() -> Result<()> {
        for (seed, shape) in [(1, (3, 8)), (2, (1, 1)), (3, (70, 5))] {
            let (x, w) = (randn(seed, shape, DType::F64)?, randn(seed + 10, shape.1, DType::F64)?);
            let dy = randn(seed + 20, shape, DType::F64)?;
            let (dx, dw) = backward(&x, &w, 0.1, &dy, true)?;
            gradient("x", &x, &dx, &dy, |x| forward(x, &w, 0.1));
            gradient("w", &w, &dw.expect("wanted"), &dy, |w| forward(&x, w, 0.1));
        }
        Ok(())
    }

    /// Squares that overflow: the row would be zeros, and nothing after it would notice.
    #[test]
    fn what_overflows_is_no_number() -> Result<()> {
        let x = Tensor::new(&[[1f32, 2.0], [1e30, 1.0]], &candle_core::Device::Cpu)?;
        let w = Tensor::ones(2, DType::F32, x.device())?;
        let (dx, dw) = backward(&x, &w, 1e-5, &Tensor::ones((2, 2), DType::F32, x.device())?, true)?;
        for y in [forward(&x, &w, 1e-5)?, forward_composed(&x, &w, 1e-5)?, dx] {
            let y = y.to_vec2::<f32>()?;
            assert!(y[0].iter().all(|y| y.is_finite()) && y[1].iter().all(|y| y.is_nan()), "{y:?}");
        }
        assert!(dw.expect("wanted").to_vec1::<f32>()?.iter().all(|y| y.is_nan()));
        Ok(())
    }

    #[test]
    fn composition_agrees() -> Result<()> {
        let (x, w, dy) =
            (randn(1, (40, 24), DType::F32)?, randn(2, 24, DType::F32)?, randn(3, (40, 24), DType::F32)?);
        close(&forward_composed(&x, &w, 1e-5)?, &forward(&x, &w, 1e-5)?, 1e-6);
        let (dx, dw) = backward(&x, &w, 1e-5, &dy, true)?;
        let (cx, cw) = backward_composed(&x, &w, 1e-5, &dy, true)?;
        close(&cx, &dx, 1e-6);
        close(&cw.expect("wanted"), &dw.expect("wanted"), 1e-6);
        Ok(())
    }
}
