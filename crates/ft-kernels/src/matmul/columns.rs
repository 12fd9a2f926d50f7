//! Copies between matrices of different row strides.

use crate::Tensor;
use crate::cpu::is_cpu;
use crate::cuda::launch::{Argument, Grid, Launch, args, compiled};
use crate::tensor::{ghosts, row_stride};
use candle_core::Result;

/// Threads per block, same as in columns.cu, and bytes that each copies.
const THREADS: usize = 256;
const BYTES: usize = 16;

/// Copies `from` `[rows, cols]`, of contiguous rows, into the matrix `to` from `row` and `col` on.
///
/// # Errors
/// A matrix that is too small, or of another dtype.
pub(super) fn copy(from: &Tensor, to: &Tensor, (row, col): (usize, usize)) -> Result<()> {
    let (rows, cols) = from.dims2()?;
    if ghosts(&[from], [], |_| ()).is_some() || rows * cols == 0 {
        return Ok(());
    }
    let to_rows = to.narrow(0, row, rows)?;
    if is_cpu(to) {
        return to_rows.slice_set(&from.contiguous()?, 1, col);
    }
    let own = to_rows.narrow(1, col, cols)?;
    let (Some(from_apart), Some(to_apart)) = (row_stride(from.layout()), row_stride(own.layout())) else {
        candle_core::bail!(
            "a copy of {:?} to {:?}: rows that are not contiguous",
            from.layout(),
            to.layout()
        );
    };
    if from.dtype() != to.dtype() {
        candle_core::bail!("a copy of {:?} to {:?}", from.dtype(), to.dtype());
    }
    let launch = Launch::of(from, compiled!(COLUMNS), "columns")?;
    let launch = launch.with(args![Argument::Rows(from), from_apart, Argument::Rows(&own), to_apart])?;
    let launch = launch.with(args![rows, cols])?;
    let units = (rows * cols * from.dtype().size_in_bytes()).div_ceil(BYTES);
    // SAFETY: both are views of `rows` rows of `cols` values with these strides, of the kernel's dtype.
    unsafe { launch.run(Grid::new(units.div_ceil(THREADS), THREADS as u32)) }
}
