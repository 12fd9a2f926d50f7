//! SwiGLU on CUDA, one launch per direction.

use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::padded::{Padded, stride};
use crate::tensor::ghosts;
use candle_core::Result;

/// Threads per block, same as in swiglu.cu; each processes 16 bytes.
const THREADS: usize = 256;

/// Number of rows and row length.
fn sizes(x: &Tensor) -> (usize, usize) {
    let width = x.dims().last().copied().unwrap_or(1);
    (x.elem_count() / width.max(1), width)
}

/// One block per row, or several for long rows.
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

/// `silu(gate) * up` `[rows, width]`, with room for `rank` columns.
pub fn forward(gate: &Tensor, up: &Tensor, rank: usize) -> Result<Padded> {
    alike(gate, &[up])?;
    let dims = sizes(gate);
    let shape = (dims.0, stride(dims.1, rank));
    if let Some([y]) = ghosts(&[gate, up], [(shape.into(), gate.dtype())], |_| ()) {
        return Padded::within(y, dims);
    }
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    let y = empty(&gate, shape, gate.dtype())?;
    let launch = Launch::of(&gate, compiled!(SWIGLU), "swiglu_forward")?;
    let launch = launch.with(args![&gate, &up, &y, dims.1, shape.1])?;
    // SAFETY: all tensors have `dims.0` rows of `dims.1` values, as checked by `alike`; y has stride
    // `shape.1`; the grid covers all rows.
    unsafe { launch.run(grid(&gate)) }?;
    Padded::within(y, dims)
}

/// Gradients of gate and up `[rows, width]`, with room for `ranks` columns. With `again`, overwrites `dy`
/// with the output of the forward pass.
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
    let launch = Launch::of(&gate, compiled!(SWIGLU), "swiglu_backward")?;
    let launch = launch.with(args![&gate, &up, &dy, &dgate, &dup, again.then_some(&dy), dims.1])?;
    let launch = launch.with(args![shapes[0].1, shapes[1].1])?;
    // SAFETY: as in `forward`; each thread writes values of `dy` only after reading them.
    unsafe { launch.run(grid(&gate)) }?;
    Ok((Padded::within(dgate, dims)?, Padded::within(dup, dims)?))
}
