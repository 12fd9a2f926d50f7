//! RMSNorm on CUDA, one launch per direction.

use super::Scale;
use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::padded::{Padded, stride};
use crate::tensor::{ghosts, ghosts_and};
use candle_core::{DType, Result, Shape};

/// Vectors of a row per thread, same as in norm.cu.
const HELD: usize = 2;
/// Maximum number of threads per block, same as in norm.cu.
const THREADS: usize = 512;
/// Maximum number of rows per block, with the weight in registers; and the number of blocks above which a
/// block processes several rows.
const ROWS: usize = 8;
const BLOCKS: usize = 128;
/// Maximum number of partial sums of the weight gradient. In f32, they are small compared to
/// the input of the backward pass.
const PARTS: usize = 256;

/// Number of rows and row length.
fn sizes(x: &Tensor, w: &Tensor) -> Result<(usize, usize)> {
    let d = w.elem_count();
    if d == 0 || x.dims().last() != Some(&d) || x.dtype() != w.dtype() {
        candle_core::bail!("norm: {:?} {:?} with {:?} {:?}", x.shape(), x.dtype(), w.shape(), w.dtype());
    }
    Ok((x.elem_count() / d, d))
}

/// Threads per block for rows of `d` values.
fn threads(d: usize, dtype: DType) -> u32 {
    let vector = 16 / dtype.size_in_bytes();
    let each = if d.is_multiple_of(vector) { vector } else { 1 };
    (d.div_ceil(each * HELD).next_multiple_of(32)).min(THREADS) as u32
}

/// Rows per block.
fn per(rows: usize) -> usize {
    (rows / BLOCKS).clamp(1, ROWS)
}

/// Norm of `x` or of `x + add`, `[rows, d]` with room for `rank` columns; and the sum, if any.
pub fn forward(
    x: &Tensor,
    add: Option<&Tensor>,
    Scale { weight: w, eps, plus }: Scale<'_>,
    rank: usize,
) -> Result<(Option<Tensor>, Padded)> {
    let (rows, d) = sizes(x, w)?;
    if add.is_some_and(|a| a.shape() != x.shape() || a.dtype() != x.dtype()) {
        candle_core::bail!("norm: {:?} with what is added to it", x.shape());
    }
    let apart = stride(d, rank);
    let (own, padded) = ((x.shape().clone(), x.dtype()), (Shape::from((rows, apart)), x.dtype()));
    if let Some(add) = add {
        if let Some([sum, y]) = ghosts(&[x, add, w], [own, padded.clone()], |_| ()) {
            return Ok((Some(sum), Padded::within(y, (rows, d))?));
        }
    } else if let Some([y]) = ghosts(&[x, w], [padded.clone()], |_| ()) {
        return Ok((None, Padded::within(y, (rows, d))?));
    }
    let (x, add, w) = (x.contiguous()?, add.map(Tensor::contiguous).transpose()?, w.contiguous()?);
    let sum = add.as_ref().map(|_| empty(&x, x.shape(), x.dtype())).transpose()?;
    let y = empty(&x, padded.0, x.dtype())?;
    let per = per(rows);
    let launch = Launch::of(&x, compiled!(NORM), "norm_forward")?;
    let launch = launch.with(args![&x, add.as_ref(), &w, sum.as_ref(), &y, rows, d, apart, per])?;
    let launch = launch.with(args![eps as f32, plus as f32])?;
    // SAFETY: x, `add` and `sum` have `rows` rows of d values, y has the same with stride `apart`, and w has
    // d values, as checked in `sizes` and above; the blocks cover all rows.
    unsafe { launch.run(Grid::new(rows.div_ceil(per), threads(d, x.dtype()))) }?;
    Ok((sum, Padded::within(y, (rows, d))?))
}

/// Gradient of `x` plus `add`, `[rows, d]` with room for `rank` columns; if requested, partial sums of the
/// gradient of `w`, `[p, d]` in f32.
pub fn backward(
    x: &Tensor,
    Scale { weight: w, eps, plus }: Scale<'_>,
    dy: &Tensor,
    add: Option<&Padded>,
    want_dw: bool,
    rank: usize,
) -> Result<(Padded, Option<Tensor>)> {
    let (rows, d) = sizes(x, w)?;
    if dy.shape() != x.shape()
        || dy.dtype() != x.dtype()
        || add.is_some_and(|a| a.dims() != (rows, d) || a.dtype() != x.dtype())
    {
        candle_core::bail!("norm: {:?} with a gradient {:?} {:?}", x.shape(), dy.shape(), dy.dtype());
    }
    let per = if want_dw { ROWS.max(rows.div_ceil(PARTS)) } else { per(rows) };
    let parts = rows.div_ceil(per);
    let apart = stride(d, rank);
    let reads: Vec<&Tensor> = [x, w, dy].into_iter().chain(add.map(Padded::all)).collect();
    let own = (Shape::from((rows, apart)), x.dtype());
    let of_w = want_dw.then(|| (Shape::from((parts, d)), DType::F32));
    if let Some(([dx], dw)) = ghosts_and(&reads, [own.clone()], of_w.clone()) {
        return Ok((Padded::within(dx, (rows, d))?, dw));
    }
    let (x, w, dy) = (x.contiguous()?, w.contiguous()?, dy.contiguous()?);
    let add = add.map(|a| Ok::<_, candle_core::Error>((a.all().contiguous()?, a.stride()))).transpose()?;
    let dx = empty(&x, own.0, x.dtype())?;
    let dw = of_w.map(|(shape, dtype)| empty(&x, shape, dtype)).transpose()?;
    let kernel = if want_dw { "norm_backward_weight" } else { "norm_backward" };
    let launch = Launch::of(&x, compiled!(NORM), kernel)?;
    let launch = launch.with(args![&x, &w, &dy, add.as_ref().map(|a| &a.0), &dx, dw.as_ref(), rows, d])?;
    let launch = launch.with(args![add.as_ref().map_or(apart, |a| a.1), apart, per])?;
    let launch = launch.with(args![eps as f32, plus as f32])?;
    // SAFETY: x, dy, `add` and dx have `rows` rows of d values, the last two with the given strides, as
    // checked above; w has d values; `dw` has one row of d values per block; the blocks cover all rows.
    unsafe { launch.run(Grid::new(parts, threads(d, x.dtype()))) }?;
    Ok((Padded::within(dx, (rows, d))?, dw))
}
