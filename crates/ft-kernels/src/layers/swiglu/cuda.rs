//! Gated feed-forward on CUDA, one launch per direction.

use super::activation::{Activation, Glu};
use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::dispatch::Sorted;
use crate::padded::{Padded, stride};
use crate::tensor::{ghosts, ghosts_and};
use candle_core::{DType, Result};

/// Threads per block, same as in swiglu.cu; each processes 16 bytes.
const THREADS: usize = 256;

/// Number of rows, and width of the output.
fn sizes(gate: &Tensor, up: Option<&Tensor>) -> (usize, usize) {
    let width = gate.dims().last().copied().unwrap_or(1);
    (gate.elem_count() / width.max(1), if up.is_some() { width } else { width / 2 })
}

/// One block per row, or several for long rows.
fn grid((rows, width): (usize, usize), x: &Tensor) -> Grid {
    let threads = (width * x.dtype().size_in_bytes()).div_ceil(16).next_multiple_of(32);
    Grid::new(rows, threads.min(THREADS) as u32).by(threads.div_ceil(THREADS))
}

fn alike(gate: &Tensor, up: Option<&Tensor>, dy: Option<&Tensor>) -> Result<()> {
    let (rows, width) = sizes(gate, up);
    let two = gate.dims().last().is_some_and(|w| w % 2 == 0);
    let fits = up.map_or(two, |up| up.shape() == gate.shape() && up.dtype() == gate.dtype())
        && dy.is_none_or(|d| d.elem_count() == rows * width && d.dtype() == gate.dtype());
    if fits {
        return Ok(());
    }
    let shape = |t: Option<&Tensor>| t.map(|t| (t.shape().clone(), t.dtype()));
    candle_core::bail!("swiglu: {:?} with {:?} and {:?}", gate.shape(), shape(up), shape(dy))
}

/// Kernel arguments of an activation: number, alpha, limit.
fn numbers(of: Activation) -> (u32, f32, f32) {
    match of {
        Activation::Silu => (0, 0.0, 0.0),
        Activation::GeluTanh => (1, 0.0, 0.0),
        Activation::Clamped { alpha, limit } => (2, alpha as f32, limit as f32),
        Activation::Sigmoid => (3, 0.0, 0.0),
    }
}

/// Distances in the input of `width` outputs a row: of rows, of neighbors, of up from its gate in one tensor.
fn places(glu: Glu, width: usize, up: Option<&Tensor>) -> (usize, usize, usize) {
    match up {
        Some(_) => (width, 1, 0),
        None => {
            let (step, up) = glu.joint.places(width);
            (2 * width, step, up)
        }
    }
}

/// `act(gate) * up` `[rows, width]`, with room for `rank` columns.
pub fn forward(glu: Glu, gate: &Tensor, up: Option<&Tensor>, rank: usize) -> Result<Padded> {
    alike(gate, up, None)?;
    let dims = sizes(gate, up);
    let shape = (dims.0, stride(dims.1, rank));
    let reads: Vec<&Tensor> = std::iter::once(gate).chain(up).collect();
    if let Some([y]) = ghosts(&reads, [(shape.into(), gate.dtype())], |_| ()) {
        return Padded::within(y, dims);
    }
    let (gate, up) = (gate.contiguous()?, up.map(Tensor::contiguous).transpose()?);
    let y = empty(&gate, shape, gate.dtype())?;
    let (apart, step, beside) = places(glu, dims.1, up.as_ref());
    let (kind, alpha, limit) = numbers(glu.activation);
    let launch = Launch::of(&gate, compiled!(SWIGLU), "swiglu_forward")?;
    let launch = launch.with(args![&gate, up.as_ref(), &y, dims.1, shape.1])?;
    let launch = launch.with(args![apart, step, beside, kind, alpha, limit])?;
    // SAFETY: gate and up have `dims.0` rows of `dims.1` values each, or one row of both, as checked by
    // `alike`; y has stride `shape.1`; the grid covers all rows.
    unsafe { launch.run(grid(dims, &gate)) }?;
    Padded::within(y, dims)
}

/// Gradients of gate and up `[rows, width]` (without `up`: of both `[rows, 2 width]`), with room for `ranks`
/// columns. With `again`, overwrites `dy` with the output of the forward pass.
pub fn backward(
    glu: Glu,
    (gate, up): (&Tensor, Option<&Tensor>),
    dy: &Tensor,
    again: bool,
    ranks: [usize; 2],
) -> Result<(Padded, Option<Padded>)> {
    alike(gate, up, Some(dy))?;
    let dims = sizes(gate, up);
    let (apart, step, beside) = places(glu, dims.1, up);
    let padded = |d: Tensor| Padded::within(d, (dims.0, apart));
    // a joint gradient has one stride
    let ranks = if up.is_some() { ranks } else { [ranks[0]; 2] };
    let shapes = ranks.map(|rank| (dims.0, stride(apart, rank)));
    let [first, second] = shapes.map(|shape| (shape.into(), gate.dtype()));
    let reads: Vec<&Tensor> = std::iter::once(gate).chain(up).chain([dy]).collect();
    if let Some(([dgate], dup)) = ghosts_and(&reads, [first], up.map(|_| second)) {
        return Ok((padded(dgate)?, dup.map(padded).transpose()?));
    }
    let (gate, up) = (gate.contiguous()?, up.map(Tensor::contiguous).transpose()?);
    let dy = if again { dy.clone() } else { dy.contiguous()? };
    let dgate = empty(&gate, shapes[0], gate.dtype())?;
    let dup = up.as_ref().map(|up| empty(up, shapes[1], up.dtype())).transpose()?;
    let (kind, alpha, limit) = numbers(glu.activation);
    let launch = Launch::of(&gate, compiled!(SWIGLU), "swiglu_backward")?;
    let launch = launch.with(args![&gate, up.as_ref(), &dy, &dgate, dup.as_ref()])?;
    let launch = launch.with(args![again.then_some(&dy), dims.1, shapes[0].1, shapes[1].1])?;
    let launch = launch.with(args![apart, step, beside, kind, alpha, limit])?;
    // SAFETY: as in `forward`, a joint gradient has rows of both; each thread writes values of `dy` only after
    // reading them.
    unsafe { launch.run(grid(dims, &gate)) }?;
    Ok((padded(dgate)?, dup.map(padded).transpose()?))
}

/// [`super::weighted_back`].
pub fn weighted_back(
    glu: Glu,
    (gate, up): (&Tensor, Option<&Tensor>),
    dy: &Tensor,
    s: &Sorted,
    factors: &Tensor,
) -> Result<(Tensor, Option<Tensor>, Tensor)> {
    alike(gate, up, Some(dy))?;
    let dims = sizes(gate, up);
    if dims.0 != s.rows() || factors.elem_count() != dims.0 || factors.dtype() != DType::F32 {
        candle_core::bail!("swiglu: {:?} weighted by {factors:?}", gate.shape());
    }
    let like = || (gate.shape().clone(), gate.dtype());
    let sums = ((s.tokens, s.top_k).into(), DType::F32);
    let reads: Vec<&Tensor> = [gate, dy, factors].into_iter().chain(up).collect();
    let found = match up {
        Some(_) => ghosts(&reads, [like(), like(), sums.clone()], |_| ()).map(|[g, u, f]| (g, Some(u), f)),
        None => ghosts(&reads, [like(), sums.clone()], |_| ()).map(|[g, f]| (g, None, f)),
    };
    if let Some(found) = found {
        return Ok(found);
    }
    let (gate, up, dy) = (gate.contiguous()?, up.map(Tensor::contiguous).transpose()?, dy.contiguous()?);
    let dgate = empty(&gate, gate.shape(), gate.dtype())?;
    let dup = up.as_ref().map(|up| empty(up, up.shape(), up.dtype())).transpose()?;
    let dfactors = empty(&gate, sums.0, DType::F32)?;
    let (apart, step, beside) = places(glu, dims.1, up.as_ref());
    let (kind, alpha, limit) = numbers(glu.activation);
    let launch = Launch::of(&gate, compiled!(SWIGLU), "swiglu_weighted")?;
    let launch = launch.with(args![&gate, up.as_ref(), &dy, &s.pair, factors, &dgate, dup.as_ref()])?;
    let launch = launch.with(args![&dfactors, dims.1, apart, step, beside, kind, alpha, limit])?;
    // SAFETY: as in `backward`; the pairs of the rows are those of `factors` and their gradients; one block a row.
    unsafe { launch.run(Grid { blocks: [dims.0, 1, 1], ..grid(dims, &gate) }) }?;
    Ok((dgate, dup, dfactors))
}
