//! Elementwise part of SwiGLU: `silu(gate) * up` (Shazeer, "GLU variants improve transformer", 2020).

mod cuda;

use crate::Tensor;
use crate::cpu::blocks::{BLOCK, Values, ghosts, written};
use crate::cpu::{Float, is_cpu, on_real, vectorised};
use crate::padded::Padded;
use candle_core::Result;

/// Values per task.
const CHUNK: usize = 16 * 1024;

/// Elementwise `silu(gate) * up`, for equal shapes.
pub fn forward(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if is_cpu(gate) {
        return on_real!(gate.dtype(), forward_cpu(gate, up));
    }
    cuda::forward(gate, up, 0)?.values()?.reshape(gate.shape())
}

/// Like [`forward`], for matrices; on CUDA the output has room for `rank` columns.
pub fn forward_padded(gate: &Tensor, up: &Tensor, rank: usize) -> Result<Padded> {
    if is_cpu(gate) { Padded::of(&forward(gate, up)?) } else { cuda::forward(gate, up, rank) }
}

/// Gradients of gate and up from the gradient of the output.
pub fn backward(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    if is_cpu(gate) {
        on_real!(gate.dtype(), backward_cpu(gate, up, dy))
    } else {
        let (dgate, dup) = cuda::backward(gate, up, dy, false, [0; 2])?;
        Ok((dgate.values()?.reshape(gate.shape())?, dup.values()?.reshape(gate.shape())?))
    }
}

/// Like [`backward`], for matrices; on CUDA the outputs have room for `ranks` columns.
pub fn backward_padded(
    gate: &Tensor,
    up: &Tensor,
    dy: &Tensor,
    ranks: [usize; 2],
) -> Result<(Padded, Padded)> {
    if !is_cpu(gate) {
        return cuda::backward(gate, up, dy, false, ranks);
    }
    let (dgate, dup) = backward(gate, up, dy)?;
    Ok((Padded::of(&dgate)?, Padded::of(&dup)?))
}

/// Like [`backward_padded`], and also recomputes the output: in one pass on CUDA, in place of `dy`.
pub fn backward_again(
    gate: &Tensor,
    up: &Tensor,
    dy: Tensor,
    ranks: [usize; 2],
) -> Result<(Padded, Padded, Tensor)> {
    if !is_cpu(gate) {
        let dy = dy.contiguous()?;
        let (dgate, dup) = cuda::backward(gate, up, &dy, true, ranks)?;
        return Ok((dgate, dup, dy));
    }
    let (dgate, dup) = backward_padded(gate, up, &dy, ranks)?;
    drop(dy);
    Ok((dgate, dup, forward(gate, up)?))
}

/// Elementwise `1 / (1 + e^-x)` by candle, for gates.
pub fn sigmoid(x: &Tensor) -> Result<Tensor> {
    match x {
        Tensor::Real(x) => candle_nn::ops::sigmoid(x).map(Tensor::Real),
        Tensor::Ghost(_) => x.exp(),
    }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn logistic<T: Float>(x: T) -> T {
    T::one() / (T::one() + (-x).exp())
}

fn forward_cpu<T: Float>(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let like = (gate.shape(), gate.dtype());
    if let Some([y]) = ghosts::<T, 1>(&[gate, up], like, BLOCK, |_| ()) {
        return Ok(y);
    }
    let (g, u) = (Values::<T>::of(gate)?, Values::<T>::of(up)?);
    let ([y], _) = written(like, CHUNK, |from, out| {
        let [mut of_g, mut of_u] = [Vec::new(), Vec::new()];
        out.each(BLOCK, |at, [y]| {
            let own = from + at..from + at + y.len();
            let (g, u) = (g.read(own.clone(), &mut of_g), u.read(own, &mut of_u));
            vectorised(|| {
                for ((y, g), u) in y.iter_mut().zip(g).zip(u) {
                    *y = *g * logistic(*g) * *u;
                }
            });
        });
    })?;
    Ok(y)
}

fn backward_cpu<T: Float>(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let like = (gate.shape(), gate.dtype());
    if let Some([dg, du]) = ghosts::<T, 2>(&[gate, up, dy], like, BLOCK, |_| ()) {
        return Ok((dg, du));
    }
    let [g, u, d] = [Values::<T>::of(gate)?, Values::of(up)?, Values::of(dy)?];
    let ([dg, du], _) = written(like, CHUNK, |from, out| {
        let [mut of_g, mut of_u, mut of_d] = [Vec::new(), Vec::new(), Vec::new()];
        out.each(BLOCK, |at, [dg, du]| {
            let own = || from + at..from + at + dg.len();
            let (g, u, d) = (g.read(own(), &mut of_g), u.read(own(), &mut of_u), d.read(own(), &mut of_d));
            vectorised(|| {
                for ((dg, du), ((g, u), d)) in dg.iter_mut().zip(du).zip(g.iter().zip(u).zip(d)) {
                    let s = logistic(*g);
                    *du = *d * *g * s;
                    *dg = *d * *u * s * (T::one() + *g * (T::one() - s));
                }
            });
        });
    })?;
    Ok((dg, du))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, gradient, randn};
    use candle_core::DType;

    #[test]
    fn gradients() -> Result<()> {
        let (g, u, dy) =
            (randn(1, (4, 6), DType::F64)?, randn(2, (4, 6), DType::F64)?, randn(3, (4, 6), DType::F64)?);
        let (dg, du) = backward(&g, &u, &dy)?;
        gradient("gate", &g, &dg, &dy, |g| forward(g, &u));
        gradient("up", &u, &du, &dy, |u| forward(&g, u));
        Ok(())
    }

    #[test]
    fn the_output_again() -> Result<()> {
        let [g, u, dy] = [1, 2, 3].map(|seed| randn(seed, (9, 7), DType::F32));
        let (g, u, dy) = (g?, u?, dy?);
        let (c, d) = backward(&g, &u, &dy)?;
        let (a, b, h) = backward_again(&g, &u, dy, [0; 2])?;
        for (x, y) in [(&a.values()?, &c), (&b.values()?, &d), (&h, &forward(&g, &u)?)] {
            close(x, y, 0.0);
        }
        Ok(())
    }
}
