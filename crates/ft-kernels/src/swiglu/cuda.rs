//! SwiGLU on CUDA: a launch each way.

use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, compiled, empty, ghosts};
use crate::padded::{Padded, stride};
use candle_core::Result;

/// Threads of a block, as in swiglu.cu; each takes 16 bytes.
const THREADS: usize = 256;

/// Rows, and values of a row.
fn sizes(x: &Tensor) -> (usize, usize) {
    let width = x.dims().last().copied().unwrap_or(1);
    (x.elem_count() / width.max(1), width)
}

/// A block a row, or some where that is long.
fn grid(x: &Tensor) -> Grid {
    let (rows, width) = sizes(x);
    let threads = (width * x.dtype().size_in_bytes()).div_ceil(16).next_multiple_of(32);
    Grid::new(rows, threads.min(THREADS) as u32).by(threads.div_ceil(THREADS))
}

fn alike(gate: &Tensor, others: &[&Tensor]) -> Result<()> {
    match others.iter().find(|t| t.shape() != gate.shape() || t.dtype() != gate.dtype()) {
        None => Ok(()),
        Some(t) => candle_core::bail!(
            "swiglu: {:?} {:?} with {:?} {:?}",
            gate.shape(),
            gate.dtype(),
            t.shape(),
            t.dtype()
        ),
    }
}

/// `silu(gate) * up` [rows, width], with room for `rank` columns more.
pub fn forward(gate: &Tensor, up: &Tensor, rank: usize) -> Result<Padded> {
    alike(gate, &[up])?;
    let dims = sizes(gate);
    let shape = (dims.0, stride(dims.1, rank));
    if let Some([y]) = ghosts(&[gate, up], [(shape.into(), gate.dtype())], |_| ()) {
        return Padded::within(y, dims);
    }
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    let y = empty(&gate, shape, gate.dtype())?;
    let launch = Launch::of(&gate, compiled!(SWIGLU), "swiglu_forward")?
        .tensor(&gate)?
        .tensor(&up)?
        .tensor(&y)?
        .count(dims.1)?
        .count(shape.1)?;
    // SAFETY: a block takes a row, or a part of one, of the three tensors; those of y are as far apart as is said.
    unsafe { launch.run(grid(&gate)) }?;
    Padded::within(y, dims)
}

/// The gradients of gate and up [rows, width], with room for `ranks` columns more; with `again` what forward gave is then in
/// `dy`.
pub fn backward(
    gate: &Tensor,
    up: &Tensor,
    dy: &Tensor,
    again: bool,
    ranks: [usize; 2],
) -> Result<(Padded, Padded)> {
    alike(gate, &[up, dy])?;
    let dims = sizes(gate);
    let shapes = ranks.map(|rank| (dims.0, stride(dims.1, rank)));
    let out = shapes.map(|shape| (shape.into(), gate.dtype()));
    if let Some([dgate, dup]) = ghosts(&[gate, up, dy], out, |_| ()) {
        return Ok((Padded::within(dgate, dims)?, Padded::within(dup, dims)?));
    }
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    let dy = if again { dy.clone() } else { dy.contiguous()? };
    let [dgate, dup] = shapes.map(|shape| empty(&gate, shape, gate.dtype()));
    let (dgate, dup) = (dgate?, dup?);
    let launch = Launch::of(&gate, compiled!(SWIGLU), "swiglu_backward")?
        .tensor(&gate)?
        .tensor(&up)?
        .tensor(&dy)?
        .tensor(&dgate)?
        .tensor(&dup)?
        .maybe(again.then_some(&dy))?
        .count(dims.1)?
        .count(shapes[0].1)?
        .count(shapes[1].1)?;
    // SAFETY: as in `forward`; a value of `dy` is read before the thread that read it writes there.
    unsafe { launch.run(grid(&gate)) }?;
    Ok((Padded::within(dgate, dims)?, Padded::within(dup, dims)?))
}
