//! SwiGLU on CUDA: a launch each way.

use crate::kernel::Tensor;
use crate::kernel::cuda::launch::{Grid, Launch, compiled, empty, ghosts};
use candle_core::Result;

/// Threads of a block, as in swiglu.cu; each takes 16 bytes.
const THREADS: usize = 256;

fn grid(x: &Tensor) -> Grid {
    Grid::new((x.elem_count() * x.dtype().size_in_bytes()).div_ceil(16 * THREADS), THREADS as u32)
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

/// `silu(gate) * up`.
pub fn forward(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    alike(gate, &[up])?;
    if let Some([y]) = ghosts(&[gate, up], [(gate.shape().clone(), gate.dtype())], |_| ()) {
        return Ok(y);
    }
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    let y = empty(&gate, gate.shape(), gate.dtype())?;
    let launch = Launch::of(&gate, compiled!(SWIGLU), "swiglu_forward")?
        .tensor(&gate)?
        .tensor(&up)?
        .tensor(&y)?
        .number(gate.elem_count() as u64);
    // SAFETY: the three tensors have as many values as the kernel is told.
    unsafe { launch.run(grid(&gate)) }?;
    Ok(y)
}

/// The gradients of gate and up; with `again` what forward gave is then in `dy`.
pub fn backward(gate: &Tensor, up: &Tensor, dy: &Tensor, again: bool) -> Result<(Tensor, Tensor)> {
    alike(gate, &[up, dy])?;
    let one = || (gate.shape().clone(), gate.dtype());
    if let Some([dgate, dup]) = ghosts(&[gate, up, dy], [one(), one()], |_| ()) {
        return Ok((dgate, dup));
    }
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    let dy = if again { dy.clone() } else { dy.contiguous()? };
    let new = || empty(&gate, gate.shape(), gate.dtype());
    let (dgate, dup) = (new()?, new()?);
    let launch = Launch::of(&gate, compiled!(SWIGLU), "swiglu_backward")?
        .tensor(&gate)?
        .tensor(&up)?
        .tensor(&dy)?
        .tensor(&dgate)?
        .tensor(&dup)?
        .maybe(again.then_some(&dy))?
        .number(gate.elem_count() as u64);
    // SAFETY: all tensors have as many values as the kernel is told; a value of `dy` is read before the thread that read
    // it writes there.
    unsafe { launch.run(grid(&gate)) }?;
    Ok((dgate, dup))
}
