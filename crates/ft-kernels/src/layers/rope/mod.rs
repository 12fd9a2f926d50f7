//! Rotary position embedding in the half-split layout of transformers (`rotate_half`), with optional norms of
//! the heads (Su et al., "RoFormer", 2021).
//!
//! `(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)`, with x1 and x2 the two halves of a head, or of its first
//! channels if the tables are shorter (partial rotary embedding). The map is orthogonal, so the backward pass is
//! the forward pass with `-sin`.

mod cuda;
mod norms;

pub use norms::Norms;

use crate::Tensor;
use crate::cpu::blocks::{Values, ghosts, written};
use crate::cpu::{Float, ROWS, is_cpu, on_real, vectorised, view};
use crate::norm;
use crate::padded::Padded;
use candle_core::Result;

/// Normalizes (if `norms` is given) and rotates the heads of queries and keys: in sequence on the CPU, in one
/// launch on CUDA. The outputs keep dtype and shape.
///
/// # Shapes
/// `q` `[t, h, c]`, `k` `[t, g, c]`, `cos` and `sin` `[t, r / 2]` in f32, for the first r channels.
pub fn forward(
    mut q: Tensor,
    mut k: Tensor,
    norms: Option<Norms<'_>>,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<[Tensor; 2]> {
    if !is_cpu(&q) {
        let [yq, yk] = cuda::forward([&q, &k], norms.as_ref(), cos, sin, 1.0, [0; 2])?;
        return Ok([yq.values()?.reshape(q.shape())?, yk.values()?.reshape(k.shape())?]);
    }
    if let Some(n) = norms {
        q = norm::forward(&q, n.q)?;
        k = norm::forward(&k, n.k)?;
    }
    q = apply(&q, cos, sin, false)?;
    k = apply(&k, cos, sin, false)?;
    Ok([q, k])
}

/// Output of [`backward`]: gradients of queries and keys, and of the norm weights.
pub type Gradients = ([Padded; 2], [Option<Tensor>; 2]);

/// Gradients of queries and keys, as rows `[t, h c]` with room for `ranks` columns on CUDA, from the
/// gradients of the outputs of [`forward`]; if requested by `want`, also partial sums `[p, c]` of the
/// gradients of the norm weights. `before` holds queries and keys before the norms.
pub fn backward(
    before: Option<(&Tensor, &Tensor, Norms<'_>)>,
    cos: &Tensor,
    sin: &Tensor,
    mut dq: Tensor,
    mut dk: Tensor,
    want: [bool; 2],
    ranks: [usize; 2],
) -> Result<Gradients> {
    if !is_cpu(&dq) {
        let Some((q, k, norms)) = before else {
            return Ok((cuda::forward([&dq, &dk], None, cos, sin, -1.0, ranks)?, [None, None]));
        };
        let all = want.contains(&true);
        let (out, dw) = cuda::backward([q, k], &norms, cos, sin, [&dq, &dk], all, ranks)?;
        let [wq, wk] = dw.map_or([None, None], |dw| dw.map(Some));
        return Ok((out, [wq.filter(|_| want[0]), wk.filter(|_| want[1])]));
    }
    dq = apply(&dq, cos, sin, true)?;
    dk = apply(&dk, cos, sin, true)?;
    let rows = |t: &Tensor| {
        let (tokens, h, c) = t.dims3()?;
        Padded::of(&t.reshape((tokens, h * c))?)
    };
    let Some((q, k, n)) = before else { return Ok(([rows(&dq)?, rows(&dk)?], [None, None])) };
    let (wq, wk);
    (dq, wq) = norm::backward(q, n.q, &dq, want[0])?;
    (dk, wk) = norm::backward(k, n.k, &dk, want[1])?;
    Ok(([rows(&dq)?, rows(&dk)?], [wq, wk]))
}

/// Rotates every head of every token on the CPU, or rotates back if `inverse` (backward pass).
///
/// # Shapes
/// `x_thc` `[t, h, c]`, `cos_tc` and `sin_tc` `[t, r / 2]` in f32 -> `[t, h, c]` in the dtype of `x`.
fn apply(x_thc: &Tensor, cos_tc: &Tensor, sin_tc: &Tensor, inverse: bool) -> Result<Tensor> {
    on_real!(x_thc.dtype(), apply_cpu(x_thc, cos_tc, sin_tc, inverse))
}

fn apply_cpu<T: Float>(x: &Tensor, cos: &Tensor, sin: &Tensor, inverse: bool) -> Result<Tensor> {
    let (t, h, c) = x.dims3()?;
    let half = cos.dim(1)?;
    if c < 2 * half || cos.dims() != [t, half] || sin.dims() != [t, half] {
        candle_core::bail!("rope: {:?} with tables {:?} and {:?}", x.shape(), cos.shape(), sin.shape());
    }
    let (row, like) = (h * c, (x.shape(), x.dtype()));
    if let Some([y]) = ghosts::<T, 1>(&[x, cos, sin], like, row, |_| ()) {
        return Ok(y);
    }
    let (x, cos, sin) = (Values::<T>::of(x)?, view::<T>(cos)?, view::<T>(sin)?);
    let sign = if inverse { -T::one() } else { T::one() };
    let ([y], _) = written(like, ROWS * row, |from, out| {
        let mut room = Vec::new();
        out.each(row, |at, [y]| {
            let at = from + at;
            let x = x.read(at..at + row, &mut room);
            let angle = at / row * half;
            let (cos, sin) = (&cos[angle..angle + half], &sin[angle..angle + half]);
            vectorised(|| {
                for (y, x) in y.chunks_mut(c).zip(x.chunks(c)) {
                    y[2 * half..].copy_from_slice(&x[2 * half..]);
                    let ((y1, y2), (x1, x2)) = (y.split_at_mut(half), x.split_at(half));
                    for i in 0..half {
                        let s = sin[i] * sign;
                        y1[i] = x1[i] * cos[i] - x2[i] * s;
                        y2[i] = x2[i] * cos[i] + x1[i] * s;
                    }
                }
            });
        });
    })?;
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, gradient, randn};
    use crate::norm::Scale;
    use candle_core::DType;

    fn tables(t: usize, half: usize) -> Result<(Tensor, Tensor)> {
        let a = randn(9, (t, half), DType::F32)?;
        Ok((a.cos()?, a.sin()?))
    }

    #[test]
    fn rope_has_its_gradient_and_inverse() -> Result<()> {
        let (cos, sin) = tables(5, 3)?;
        let (x, dy) = (randn(1, (5, 2, 6), DType::F64)?, randn(2, (5, 2, 6), DType::F64)?);
        let dx = apply(&dy, &cos, &sin, true)?;
        gradient("x", &x, &dx, &dy, |x| apply(x, &cos, &sin, false));
        close(&apply(&apply(&x, &cos, &sin, false)?, &cos, &sin, true)?, &x, 1e-6);
        // the first four channels of six
        let (cos, sin) = (cos.narrow(1, 0, 2)?.contiguous()?, sin.narrow(1, 0, 2)?.contiguous()?);
        let dx = apply(&dy, &cos, &sin, true)?;
        gradient("x", &x, &dx, &dy, |x| apply(x, &cos, &sin, false));
        let (first, rest) = (x.narrow(2, 0, 4)?.contiguous()?, x.narrow(2, 4, 2)?);
        let want = Tensor::cat(&[apply(&first, &cos, &sin, false)?, rest], 2)?;
        close(&apply(&x, &cos, &sin, false)?, &want, 0.0);
        Ok(())
    }

    fn with<'a>(wq: &'a Tensor, wk: &'a Tensor) -> Norms<'a> {
        Norms { q: Scale::new(wq, 0.1), k: Scale::new(wk, 0.2) }
    }

    /// Gradients of inputs and weights, with and without norms.
    #[test]
    fn gradients_through_norms() -> Result<()> {
        let (cos, sin) = tables(5, 2)?;
        let [q, dq] = [1, 2].map(|seed| randn(seed, (5, 3, 4), DType::F64));
        let [k, dk] = [3, 4].map(|seed| randn(seed, (5, 2, 4), DType::F64));
        let (q, dq, k, dk) = (q?, dq?, k?, dk?);
        let (wq, wk) = (randn(5, 4, DType::F64)?, randn(6, 4, DType::F64)?);
        let norms = with(&wq, &wk);
        let run = |q: &Tensor, k: &Tensor, norms: Option<[&Tensor; 2]>, of: usize| -> Result<Tensor> {
            let norms = norms.map(|[wq, wk]| with(wq, wk));
            Ok(forward(q.clone(), k.clone(), norms, &cos, &sin)?[of].clone())
        };
        let before = Some((&q, &k, norms));
        let ([gq, gk], [gwq, gwk]) = backward(before, &cos, &sin, dq.clone(), dk.clone(), [true; 2], [0; 2])?;
        let by_head = |rows: &Padded, like: &Tensor| rows.values()?.reshape(like.shape());
        let (gq, gk) = (by_head(&gq, &q)?, by_head(&gk, &k)?);
        gradient("q", &q, &gq, &dq, |q| run(q, &k, Some([&wq, &wk]), 0));
        gradient("k", &k, &gk, &dk, |k| run(&q, k, Some([&wq, &wk]), 1));
        let (gwq, gwk) = (gwq.expect("wanted").flatten_all()?, gwk.expect("wanted").flatten_all()?);
        gradient("wq", &wq, &gwq, &dq, |w| run(&q, &k, Some([w, &wk]), 0));
        gradient("wk", &wk, &gwk, &dk, |w| run(&q, &k, Some([&wq, w]), 1));
        let ([gq, gk], none) = backward(None, &cos, &sin, dq.clone(), dk.clone(), [false; 2], [0; 2])?;
        let (gq, gk) = (by_head(&gq, &q)?, by_head(&gk, &k)?);
        assert!(none.iter().all(Option::is_none));
        gradient("q", &q, &gq, &dq, |q| run(q, &k, None, 0));
        gradient("k", &k, &gk, &dk, |k| run(&q, k, None, 1));
        Ok(())
    }
}
