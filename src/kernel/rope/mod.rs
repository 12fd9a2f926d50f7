//! Rotary position embedding in the half-split layout of transformers (`rotate_half`):
//! `(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)`, x1 and x2 the two halves of a head
//! (Su et al., "RoFormer", 2021). The map is orthogonal, so backward is forward with `-sin`.

use super::cpu::{ROWS, Real, ghosts, is_cpu, on_real, tensor, view};
use crate::kernel::Tensor;
use candle_core::{D, DType, Result};
use rayon::prelude::*;

/// Rotates every head of every token; with `inverse`, rotates back (the backward pass).
///
/// # Shapes
/// `x_thc` [t, h, c], `cos_tc` and `sin_tc` [t, c / 2] in f32 -> [t, h, c] in `x`'s dtype.
pub fn apply(x_thc: &Tensor, cos_tc: &Tensor, sin_tc: &Tensor, inverse: bool) -> Result<Tensor> {
    if is_cpu(x_thc) {
        on_real!(x_thc.dtype(), apply_cpu(x_thc, cos_tc, sin_tc, inverse))
    } else {
        apply_composed(x_thc, cos_tc, sin_tc, inverse)
    }
}

fn apply_cpu<T: Real>(x: &Tensor, cos: &Tensor, sin: &Tensor, inverse: bool) -> Result<Tensor> {
    let (t, h, c) = x.dims3()?;
    let half = c / 2;
    if c % 2 != 0 || cos.dims() != [t, half] || sin.dims() != [t, half] {
        candle_core::bail!("rope: {:?} with tables {:?} and {:?}", x.shape(), cos.shape(), sin.shape());
    }
    if let Some([y]) = ghosts::<T, 1>(&[x, cos, sin], [(x.shape().clone(), x.dtype())], |_| ()) {
        return Ok(y);
    }
    let (xv, cv, sv) = (view::<T>(x)?, view::<T>(cos)?, view::<T>(sin)?);
    let sign = if inverse { -T::one() } else { T::one() };
    let mut y = vec![T::zero(); xv.len()];
    y.par_chunks_mut(ROWS * h * c)
        .zip(xv.par_chunks(ROWS * h * c))
        .zip(cv.par_chunks(ROWS * half).zip(sv.par_chunks(ROWS * half)))
        .for_each(|((y, x), (cos, sin))| {
            let tokens = y.chunks_mut(h * c).zip(x.chunks(h * c)).zip(cos.chunks(half).zip(sin.chunks(half)));
            for ((y, x), (cos, sin)) in tokens {
                for (y, x) in y.chunks_mut(c).zip(x.chunks(c)) {
                    let ((y1, y2), (x1, x2)) = (y.split_at_mut(half), x.split_at(half));
                    for i in 0..half {
                        let s = sin[i] * sign;
                        y1[i] = x1[i] * cos[i] - x2[i] * s;
                        y2[i] = x2[i] * cos[i] + x1[i] * s;
                    }
                }
            }
        });
    tensor(y, x.shape(), x.dtype())
}

fn apply_composed(x: &Tensor, cos: &Tensor, sin: &Tensor, inverse: bool) -> Result<Tensor> {
    let (_, _, c) = x.dims3()?;
    let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let (cos, sin) = (cos.to_dtype(wide)?.unsqueeze(1)?, sin.to_dtype(wide)?.unsqueeze(1)?);
    let sin = if inverse { sin.neg()? } else { sin };
    let xw = x.to_dtype(wide)?;
    let (x1, x2) = (xw.narrow(D::Minus1, 0, c / 2)?, xw.narrow(D::Minus1, c / 2, c / 2)?);
    let y1 = (x1.broadcast_mul(&cos)? - x2.broadcast_mul(&sin)?)?;
    let y2 = (x2.broadcast_mul(&cos)? + x1.broadcast_mul(&sin)?)?;
    Tensor::cat(&[y1, y2], D::Minus1)?.contiguous()?.to_dtype(x.dtype())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::check::{close, gradient, randn};

    fn tables(t: usize, half: usize) -> Result<(Tensor, Tensor)> {
        let a = randn(9, (t, half), DType::F32)?;
        Ok((a.cos()?, a.sin()?))
    }

    #[test]
    fn gradient_and_inverse() -> Result<()> {
        let (cos, sin) = tables(5, 3)?;
        let (x, dy) = (randn(1, (5, 2, 6), DType::F64)?, randn(2, (5, 2, 6), DType::F64)?);
        let dx = apply(&dy, &cos, &sin, true)?;
        gradient("x", &x, &dx, &dy, |x| apply(x, &cos, &sin, false));
        close(&apply(&apply(&x, &cos, &sin, false)?, &cos, &sin, true)?, &x, 1e-6);
        Ok(())
    }

    #[test]
    fn composition_agrees() -> Result<()> {
        let (cos, sin) = tables(40, 8)?;
        let x = randn(1, (40, 3, 16), DType::F32)?;
        for inverse in [false, true] {
            close(&apply_composed(&x, &cos, &sin, inverse)?, &apply(&x, &cos, &sin, inverse)?, 1e-6);
        }
        Ok(())
    }
}
