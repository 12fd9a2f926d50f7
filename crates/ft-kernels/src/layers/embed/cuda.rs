//! Table lookup on CUDA, and the gradient of the table.

use super::by_id::ById;
use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::tensor::ghosts;
use candle_core::{DType, Result};

/// Threads per block, same as in embed.cu.
const THREADS: usize = 128;

/// One block per row, or several so that a thread processes 16 bytes.
fn grid(rows: usize, columns: usize, dtype: DType) -> Grid {
    Grid::new(rows, THREADS as u32).by((columns * dtype.size_in_bytes()).div_ceil(16 * THREADS))
}

/// Looks up rows of `table` `[v, d]` for `ids` `[t]`.
pub fn forward(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let ((v, d), t) = (table.dims2()?, ids.elem_count());
    if let Some([y]) = ghosts(&[table, ids], [((t, d).into(), table.dtype())], |_| ()) {
        return Ok(y);
    }
    let (table, ids) = (table.contiguous()?, ids.contiguous()?);
    if ids.dtype() != DType::U32 {
        candle_core::bail!("embedding: ids in {:?}", ids.dtype());
    }
    let y = empty(&table, (t, d), table.dtype())?;
    let launch = Launch::of(&table, compiled!(EMBED), "embed_rows")?.with(args![&table, &ids, &y, v, d])?;
    // SAFETY: `y` has one row of d values per id, and the kernel reads no row for ids of v or more.
    unsafe { launch.run(grid(t, d, table.dtype())) }?;
    Ok(y)
}

/// `grad[ids[i]] += scale * dy[i]` for every token.
pub fn backward(grad: &Tensor, by_id: Option<&ById>, dy: &Tensor, scale: f64) -> Result<()> {
    let ((v, d), (t, _)) = (grad.dims2()?, dy.dims2()?);
    // upper bound: every token has a different id
    if ghosts(&[dy], [], |l| l.touch(4 * (3 * t as u64 + 1))).is_some() {
        return Ok(());
    }
    let Some(by_id) = by_id else { candle_core::bail!("embedding: tokens that are not sorted by id") };
    let ById { list, ids } = by_id;
    let ordered = list.len() - 2 * ids - 1;
    if by_id.is_outside(v) || ordered > t || dy.dims() != [t, d] || grad.dtype() != DType::F32 {
        candle_core::bail!(
            "embedding: an id outside the table of {v} rows, or {:?} rows of gradient",
            dy.shape()
        );
    }
    if *ids == 0 {
        return Ok(());
    }
    let dy = dy.contiguous()?;
    let list = Tensor::from_slice(list, list.len(), dy.device())?;
    let (unique, starts) = (list.narrow(0, 0, *ids)?, list.narrow(0, *ids, ids + 1)?);
    let order = list.narrow(0, 2 * ids + 1, ordered)?;
    let launch = Launch::of(&dy, compiled!(EMBED), "embed_gradient")?;
    let launch = launch.with(args![grad, &unique, &starts, &order, &dy, d, scale as f32])?;
    // SAFETY: ids are below v and `order` is no longer than t, as checked above; `ById` makes the indices in
    // `order` valid rows of `dy` and the offsets in `starts` valid in `order`. Rows have d values, and each
    // id has a separate block.
    unsafe { launch.run(grid(*ids, d, DType::F32)) }
}
