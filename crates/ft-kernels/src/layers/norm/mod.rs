//! RMSNorm: `y = w * x / sqrt(mean(x^2) + eps)` over the last axis (Zhang and Sennrich, "Root Mean Square
//! Layer Normalization", 2019). Some families store `w - 1`.

mod cuda;

use crate::Tensor;
use crate::cpu::blocks::{Values, ghosts, written};
use crate::cpu::{Float, ROWS, View, dot, is_cpu, on_real, tensor, vectorised, view};
use crate::ledger::{Allocation, Ledger};
use crate::padded::Padded;
use crate::tensor::Ghost;
use candle_core::Result;

/// Weight and constants of a norm.
#[derive(Clone, Copy, Debug)]
pub struct Scale<'a> {
    /// Weight `[d]`.
    pub weight: &'a Tensor,
    /// Added to the mean square.
    pub eps: f64,
    /// Added to the weight: 1 if it is stored as `w - 1`, else 0.
    pub plus: f64,
}

impl<'a> Scale<'a> {
    /// A norm with the weight as it is.
    pub fn new(weight: &'a Tensor, eps: f64) -> Self {
        Self { weight, eps, plus: 0.0 }
    }

    /// The factors of a row on the CPU.
    fn factors<T: Float>(self) -> Result<View<'a, T>> {
        let w = view::<T>(self.weight)?;
        if self.plus == 0.0 {
            return Ok(w);
        }
        Ok(View::Owned(w.iter().map(|w| *w + T::of(self.plus)).collect()))
    }

    /// Records the factors, for ghosts.
    fn held<T: Float>(self, l: &Ledger) -> Allocation {
        let values = if self.plus == 0.0 { 0 } else { self.weight.elem_count() };
        l.hold((values * T::DTYPE.size_in_bytes()) as u64)
    }
}

/// Normalizes the last axis.
///
/// # Shapes
/// `x` `[.., d]` -> `[.., d]` in the dtype of `x`; the mean is computed in f32 (f64 for f64).
pub fn forward(x: &Tensor, of: Scale<'_>) -> Result<Tensor> {
    if is_cpu(x) {
        on_real!(x.dtype(), forward_cpu(x, of))
    } else {
        cuda::forward(x, None, of, 0)?.1.values()?.reshape(x.shape())
    }
}

/// Like [`forward`], for a matrix; on CUDA the output has room for `rank` columns.
pub fn forward_padded(x: &Tensor, of: Scale<'_>, rank: usize) -> Result<Padded> {
    if is_cpu(x) { Padded::of(&forward(x, of)?) } else { Ok(cuda::forward(x, None, of, rank)?.1) }
}

/// `x + a` and the norm of the sum, in one pass on CUDA; there the norm has room for `rank` columns.
pub fn forward_add(x: &Tensor, a: Tensor, of: Scale<'_>, rank: usize) -> Result<(Tensor, Padded)> {
    if is_cpu(x) {
        let sum = (x + a)?;
        let y = forward(&sum, of)?;
        return Ok((sum, Padded::of(&y)?));
    }
    match cuda::forward(x, Some(&a), of, rank)? {
        (Some(sum), y) => Ok((sum, y)),
        (None, _) => candle_core::bail!("norm: no sum"),
    }
}

/// Gradients of `x` and, if requested, of `w` (f32; f64 for f64) from the gradient of the output. The
/// gradient of `w` is returned as partial sums `[p, d]`: one row on the CPU, one per block on CUDA.
///
/// Recomputes the norm from `x`: one extra pass instead of saved activations.
pub fn backward(x: &Tensor, of: Scale<'_>, dy: &Tensor, want_dw: bool) -> Result<(Tensor, Option<Tensor>)> {
    if is_cpu(x) {
        on_real!(x.dtype(), backward_cpu(x, of, dy, want_dw))
    } else {
        let (dx, dw) = cuda::backward(x, of, dy, None, want_dw, 0)?;
        Ok((dx.values()?.reshape(x.shape())?, dw))
    }
}

/// Like [`backward`], for a matrix, with `add` added to the gradient of `x`; on CUDA in one pass, with room
/// for `rank` columns.
pub fn backward_add(
    x: &Tensor,
    of: Scale<'_>,
    dy: &Tensor,
    add: &Padded,
    want_dw: bool,
    rank: usize,
) -> Result<(Padded, Option<Tensor>)> {
    if !is_cpu(x) {
        return cuda::backward(x, of, dy, Some(add), want_dw, rank);
    }
    let (dx, dw) = backward(x, of, dy, want_dw)?;
    Ok((Padded::of(&(add.values()? + dx)?)?, dw))
}

/// Scale of a row. NaN, not 0, if the squares overflow: zeros would hide a diverged model.
#[inline(always)]
fn scale<T: Float>(row: &[T], eps: f64) -> T {
    let mean = dot(row, row) / T::of(row.len() as f64) + T::of(eps);
    (mean * T::zero() + T::one()) / mean.sqrt()
}

fn forward_cpu<T: Float>(x: &Tensor, of: Scale<'_>) -> Result<Tensor> {
    let (d, eps, like) = (of.weight.dim(0)?, of.eps, (x.shape(), x.dtype()));
    if let Some([y]) = ghosts::<T, 1>(&[x, of.weight], like, d, |l| drop(of.held::<T>(l))) {
        return Ok(y);
    }
    let (x, w) = (Values::<T>::of(x)?, of.factors::<T>()?);
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

fn backward_cpu<T: Float>(
    x: &Tensor,
    of: Scale<'_>,
    dy: &Tensor,
    want_dw: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let (d, eps, like) = (of.weight.dim(0)?, of.eps, (x.shape(), x.dtype()));
    let partial = |l: &Ledger| {
        let _factors = of.held::<T>(l);
        let parts = if want_dw { x.elem_count().div_ceil(ROWS) } else { 0 };
        l.touch((T::DTYPE.size_in_bytes() * parts) as u64);
    };
    if let Some([dx]) = ghosts::<T, 1>(&[x, of.weight, dy], like, d, partial) {
        let ledger = dx.ghost().map(Ghost::ledger);
        let dw = ledger.filter(|_| want_dw).map(|l| Ghost::new(l, (1, d), T::DTYPE).into());
        return Ok((dx, dw));
    }
    let (x, w, dy) = (Values::<T>::of(x)?, of.factors::<T>()?, Values::<T>::of(dy)?);
    // one partial sum per block of rows, added in order below: same bits for any number of threads
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
    fn gradients_match_finite_differences() -> Result<()> {
        for (seed, shape) in [(1, (3, 8)), (2, (1, 1)), (3, (70, 5))] {
            let (x, w) = (randn(seed, shape, DType::F64)?, randn(seed + 10, shape.1, DType::F64)?);
            let dy = randn(seed + 20, shape, DType::F64)?;
            for plus in [0.0, 1.0] {
                fn of(weight: &Tensor, plus: f64) -> Scale<'_> {
                    Scale { weight, eps: 0.1, plus }
                }
                let (dx, dw) = backward(&x, of(&w, plus), &dy, true)?;
                gradient("x", &x, &dx, &dy, |x| forward(x, of(&w, plus)));
                gradient("w", &w, &dw.expect("wanted").flatten_all()?, &dy, |w| forward(&x, of(w, plus)));
            }
        }
        Ok(())
    }

    /// Overflowing squares give NaN; zeros would go unnoticed.
    #[test]
    fn overflowing_squares_give_nan() -> Result<()> {
        let x = Tensor::new(&[[1f32, 2.0], [1e30, 1.0]], &candle_core::Device::Cpu)?;
        let w = Tensor::ones(2, DType::F32, x.device())?;
        let (dx, dw) =
            backward(&x, Scale::new(&w, 1e-5), &Tensor::ones((2, 2), DType::F32, x.device())?, true)?;
        for y in [forward(&x, Scale::new(&w, 1e-5))?, dx] {
            let y = y.to_vec2::<f32>()?;
            assert!(y[0].iter().all(|y| y.is_finite()) && y[1].iter().all(|y| y.is_nan()), "{y:?}");
        }
        assert!(dw.expect("wanted").to_vec2::<f32>()?[0].iter().all(|y| y.is_nan()));
        Ok(())
    }

    /// A weight stored as `w - 1`.
    #[test]
    fn plus_one_norms_equal_norms_of_the_whole_weight() -> Result<()> {
        let (x, w, dy) =
            (randn(1, (33, 8), DType::F64)?, randn(2, 8, DType::F64)?, randn(3, (33, 8), DType::F64)?);
        let less = (&w - 1.0)?;
        let (whole, stored) = (Scale::new(&w, 1e-5), Scale { plus: 1.0, ..Scale::new(&less, 1e-5) });
        close(&forward(&x, stored)?, &forward(&x, whole)?, 1e-14);
        let ((a, b), (c, d)) = (backward(&x, stored, &dy, true)?, backward(&x, whole, &dy, true)?);
        close(&a, &c, 1e-13);
        close(&b.expect("wanted"), &d.expect("wanted"), 1e-13);
        Ok(())
    }

    #[test]
    fn a_norm_fused_with_an_addition_has_the_same_bits() -> Result<()> {
        let [x, a, dy] = [1, 2, 3].map(|seed| randn(seed, (40, 24), DType::F32));
        let (x, a, dy, w) = (x?, a?, dy?, randn(4, 24, DType::F32)?);
        let of = Scale::new(&w, 1e-5);
        let (sum, y) = forward_add(&x, a.clone(), of, 0)?;
        close(&sum, &(&x + &a)?, 0.0);
        close(&y.values()?, &forward(&sum, of)?, 0.0);
        let (dx, dw) = backward_add(&sum, of, &dy, &Padded::of(&a)?, true, 0)?;
        let (own, own_w) = backward(&sum, of, &dy, true)?;
        close(&dx.values()?, &(own + a)?, 0.0);
        close(&dw.expect("wanted"), &own_w.expect("wanted"), 0.0);
        Ok(())
    }
}
