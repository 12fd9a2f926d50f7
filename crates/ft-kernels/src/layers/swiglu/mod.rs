//! Elementwise part of a gated feed-forward: `act(gate) * up` (Shazeer, "GLU variants improve transformer",
//! 2020), for gate and up projection in two tensors or in one.

mod activation;
mod cuda;

pub(crate) use activation::logistic;
pub use activation::{Activation, Glu, Joint};

use crate::Tensor;
use crate::cpu::blocks::{BLOCK, Values, ghosts, written};
use crate::cpu::{Float, ROWS, is_cpu, on_real, vectorised};
use crate::dispatch::Sorted;
use crate::padded::Padded;
use activation::{Function, with_function};
use candle_core::Result;

/// Values per task.
const CHUNK: usize = 16 * 1024;

/// Elementwise `act(gate) * up`, for equal shapes. Without `up`, `gate` `[t, 2 f]` holds both.
pub fn forward(glu: Glu, gate: &Tensor, up: Option<&Tensor>) -> Result<Tensor> {
    if !is_cpu(gate) {
        let y = cuda::forward(glu, gate, up, 0)?.values()?;
        return if up.is_some() { y.reshape(gate.shape()) } else { Ok(y) };
    }
    match up {
        Some(up) => on_real!(gate.dtype(), forward_cpu(glu, gate, up)),
        None => on_real!(gate.dtype(), forward_joint(glu, gate)),
    }
}

/// Like [`forward`], for matrices; on CUDA the output has room for `rank` columns.
pub fn forward_padded(glu: Glu, gate: &Tensor, up: Option<&Tensor>, rank: usize) -> Result<Padded> {
    if is_cpu(gate) { Padded::of(&forward(glu, gate, up)?) } else { cuda::forward(glu, gate, up, rank) }
}

/// Gradients of gate and up (or of both in one tensor) from the gradient of the output.
pub fn backward(
    glu: Glu,
    gate: &Tensor,
    up: Option<&Tensor>,
    dy: &Tensor,
) -> Result<(Tensor, Option<Tensor>)> {
    if !is_cpu(gate) {
        let (dgate, dup) = cuda::backward(glu, (gate, up), dy, false, [0; 2])?;
        let shaped = |d: Padded| d.values()?.reshape(gate.shape());
        return Ok((shaped(dgate)?, dup.map(shaped).transpose()?));
    }
    let Some(up) = up else { return Ok((on_real!(gate.dtype(), backward_joint(glu, gate, dy))?, None)) };
    let (dgate, dup) = on_real!(gate.dtype(), backward_cpu(glu, gate, up, dy))?;
    Ok((dgate, Some(dup)))
}

/// As [`backward`], for gate and up in two tensors.
pub fn backward_pair(glu: Glu, gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    match backward(glu, gate, Some(up), dy)? {
        (dgate, Some(dup)) => Ok((dgate, dup)),
        (_, None) => candle_core::bail!("swiglu: no gradient of up"),
    }
}

/// Like [`backward`], for matrices; on CUDA the outputs have room for `ranks` columns.
pub fn backward_padded(
    glu: Glu,
    gate: &Tensor,
    up: Option<&Tensor>,
    dy: &Tensor,
    ranks: [usize; 2],
) -> Result<(Padded, Option<Padded>)> {
    if !is_cpu(gate) {
        return cuda::backward(glu, (gate, up), dy, false, ranks);
    }
    let (dgate, dup) = backward(glu, gate, up, dy)?;
    Ok((Padded::of(&dgate)?, dup.map(|d| Padded::of(&d)).transpose()?))
}

/// Like [`backward_padded`], and also recomputes the output: in one pass on CUDA, in place of `dy`.
pub fn backward_again(
    glu: Glu,
    gate: &Tensor,
    up: Option<&Tensor>,
    dy: Tensor,
    ranks: [usize; 2],
) -> Result<(Padded, Option<Padded>, Tensor)> {
    if !is_cpu(gate) {
        let dy = dy.contiguous()?;
        let (dgate, dup) = cuda::backward(glu, (gate, up), &dy, true, ranks)?;
        return Ok((dgate, dup, dy));
    }
    let (dgate, dup) = backward_padded(glu, gate, up, &dy, ranks)?;
    drop(dy);
    Ok((dgate, dup, forward(glu, gate, up)?))
}

/// Gradients of gate and up (or of both in one tensor), and of the `factors` `[t, k]` (f32) on rows sorted by expert,
/// on CUDA. A row of the output times its factor has the gradient `dy` times the factor.
pub fn weighted_back(
    glu: Glu,
    gate: &Tensor,
    up: Option<&Tensor>,
    dy: &Tensor,
    s: &Sorted,
    factors: &Tensor,
) -> Result<(Tensor, Option<Tensor>, Tensor)> {
    cuda::weighted_back(glu, (gate, up), dy, s, factors)
}

/// Elementwise `1 / (1 + e^-x)` by candle, for gates.
pub fn sigmoid(x: &Tensor) -> Result<Tensor> {
    match x {
        Tensor::Real(x) => candle_nn::ops::sigmoid(x).map(Tensor::Real),
        Tensor::Ghost(_) => x.exp(),
    }
}

fn forward_cpu<T: Float>(glu: Glu, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
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
            with_function!(glu.activation, f => vectorised(|| {
                for ((y, g), u) in y.iter_mut().zip(g).zip(u) {
                    *y = f.value(*g, *u);
                }
            }));
        });
    })?;
    Ok(y)
}

/// Rows and inner width of a tensor that holds gate and up.
fn joint_sizes(both: &Tensor) -> Result<(usize, usize)> {
    match both.dims2()? {
        (t, two) if two % 2 == 0 => Ok((t, two / 2)),
        _ => candle_core::bail!("swiglu: {:?} for gate and up", both.shape()),
    }
}

fn forward_joint<T: Float>(glu: Glu, both: &Tensor) -> Result<Tensor> {
    let (t, f) = joint_sizes(both)?;
    let shape = (t, f).into();
    let like = (&shape, both.dtype());
    if let Some([y]) = ghosts::<T, 1>(&[both], like, 2 * f, |_| ()) {
        return Ok(y);
    }
    let (x, (step, up)) = (Values::<T>::of(both)?, glu.joint.places(f));
    let ([y], _) = written(like, ROWS * f, |from, out| {
        let mut room = Vec::new();
        out.each(f, |at, [y]| {
            let x = x.read(2 * (from + at)..2 * (from + at + f), &mut room);
            with_function!(glu.activation, a => vectorised(|| {
                for (i, y) in y.iter_mut().enumerate() {
                    *y = a.value(x[step * i], x[step * i + up]);
                }
            }));
        });
    })?;
    Ok(y)
}

fn backward_cpu<T: Float>(glu: Glu, gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
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
            with_function!(glu.activation, f => vectorised(|| {
                for ((dg, du), ((g, u), d)) in dg.iter_mut().zip(du).zip(g.iter().zip(u).zip(d)) {
                    let (of_gate, of_up) = f.slopes(*g, *u);
                    *dg = *d * of_gate;
                    *du = *d * of_up;
                }
            }));
        });
    })?;
    Ok((dg, du))
}

fn backward_joint<T: Float>(glu: Glu, both: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let (t, f) = joint_sizes(both)?;
    if dy.dims() != [t, f] {
        candle_core::bail!("swiglu: {:?} with {:?}", both.shape(), dy.shape());
    }
    let like = (both.shape(), both.dtype());
    if let Some([d]) = ghosts::<T, 1>(&[both, dy], like, 2 * f, |_| ()) {
        return Ok(d);
    }
    let (x, d, (step, up)) = (Values::<T>::of(both)?, Values::<T>::of(dy)?, glu.joint.places(f));
    let ([dx], _) = written(like, ROWS * 2 * f, |from, out| {
        let [mut of_x, mut of_d] = [Vec::new(), Vec::new()];
        out.each(2 * f, |at, [dx]| {
            let at = from + at;
            let (x, d) = (x.read(at..at + 2 * f, &mut of_x), d.read(at / 2..at / 2 + f, &mut of_d));
            with_function!(glu.activation, a => vectorised(|| {
                for (i, d) in d.iter().enumerate() {
                    let (of_gate, of_up) = a.slopes(x[step * i], x[step * i + up]);
                    dx[step * i] = *d * of_gate;
                    dx[step * i + up] = *d * of_up;
                }
            }));
        });
    })?;
    Ok(dx)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
