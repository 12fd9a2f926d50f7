//! Casts and products on CUDA.

use super::library::{self, E4M3, E5M2, Places, Shape};
use super::{PARTS, Source, WORKSPACE};
use crate::Tensor;
use crate::cuda::launch::{Argument, Grid, Launch, address_of, args, at, compiled, empty};
use crate::quantized::launch_of;
use crate::quantized::tiles::name;
use crate::tensor::row_stride;
use candle_core::{DType, Result};

/// Threads of a block, and rows and columns of a tile: same as in fp8.cu.
const THREADS: u32 = 256;
const TILE: usize = 64;

/// A matrix in 8-bit floats, with scales.
struct Cast {
    /// `[rows, inner]`, u8.
    values: Tensor,
    /// `[rows]`, f32: of each row, or all alike.
    scales: Tensor,
}

/// Casts a weight `[o, i]` to e4m3 `[outputs, inner]`: transposed if `back`. One scale, repeated. Fills `parts`.
fn weight(source: &Source, back: bool, on: &Tensor, parts: &Tensor) -> Result<Cast> {
    let (rows, cols) = source.dims();
    let (outputs, inner) = if back { (cols, rows) } else { (rows, cols) };
    let values = empty(on, (outputs, inner), DType::U8)?;
    let scales = empty(on, outputs, DType::F32)?;
    let grid = Grid::new(cols.div_ceil(TILE), THREADS).by(rows.div_ceil(TILE));
    let shape = args![rows, cols, parts, u32::from(back), &values, &scales, outputs];
    // blocks of the first kernel: a row each, or a scale a thread
    let blocks = match source {
        Source::Dense(_) => rows,
        Source::Blocks(w) => (rows * cols).div_ceil(w.block() * THREADS as usize),
    };
    let (amax, cast) = match source {
        Source::Dense(w) => {
            let Some(apart) = row_stride(w.layout()) else {
                candle_core::bail!("fp8: a weight whose rows are not contiguous: {:?}", w.layout())
            };
            let of = Argument::Rows(w);
            let amax =
                Launch::of(w, compiled!(FP8), "fp8_amax")?.with(args![of, apart, rows, cols, parts])?;
            (amax, Launch::of(w, compiled!(FP8), "fp8_matrix")?.with(args![of, apart])?)
        }
        Source::Blocks(w) => {
            let amax = launch_of(w, Launch::named(on, compiled!(FP8), "fp8_amax_blocks")?)?;
            let kernel = name("fp8_blocks", w.source_dtype(), w.dtype());
            (
                amax.with(args![w.largest_code(), parts])?,
                launch_of(w, Launch::named(on, compiled!(FP8), kernel)?)?,
            )
        }
    };
    // SAFETY: a kernel reads rows [rows, cols] of this stride, or the blocks of the matrix, whose parts were checked
    // when it was made, and writes all parts; the other writes all values and scales of the sizes above.
    unsafe {
        amax.run(Grid::new(blocks.min(PARTS), THREADS))?;
        cast.with(shape)?.run(grid)?;
    }
    Ok(Cast { values, scales })
}

/// Casts rows `[t, inner]`, with a scale each or, if `parts` are given, one for all.
fn rows(x: &Tensor, format: &str, parts: Option<&Tensor>) -> Result<Cast> {
    let ((t, cols), Some(apart)) = (x.dims2()?, row_stride(x.layout())) else {
        candle_core::bail!("fp8: rows that are not contiguous: {:?}", x.layout())
    };
    let (values, scales) = (empty(x, (t, cols), DType::U8)?, empty(x, t, DType::F32)?);
    let of = Argument::Rows(x);
    if let Some(parts) = parts {
        let amax = Launch::of(x, compiled!(FP8), "fp8_amax")?.with(args![of, apart, t, cols, parts])?;
        // SAFETY: reads rows [t, cols] of this stride, writes all parts.
        unsafe { amax.run(Grid::new(t.min(PARTS), THREADS)) }?;
    }
    let cast = Launch::of(x, compiled!(FP8), &format!("fp8_rows_{format}"))?;
    let cast = cast.with(args![of, apart, cols, parts, &values, &scales])?;
    // SAFETY: a block a row of [t, cols]; values and scales have these sizes.
    unsafe { cast.run(Grid::new(t, THREADS)) }?;
    Ok(Cast { values, scales })
}

/// Whether a result can be written in place: bf16, rows and address at multiples of 16 bytes.
fn takes(out: &Tensor) -> bool {
    let rows = row_stride(out.layout()).is_some_and(|apart| apart.is_multiple_of(8));
    let placed = || out.real().and_then(at).is_ok_and(|at| at.is_multiple_of(16));
    out.dtype() == DType::BF16 && rows && placed()
}

/// `x W^T`, or `x W` if `back`, added to `sum` if given. `x` is `[t, inner]` in bf16.
pub fn product(source: &Source, back: bool, x: &Tensor, sum: Option<Tensor>) -> Result<Tensor> {
    let (o, i) = source.dims();
    let ((t, inner), (outputs, of)) = (x.dims2()?, if back { (i, o) } else { (o, i) });
    if inner != of || sum.as_ref().is_some_and(|s| s.dims() != [t, outputs]) {
        candle_core::bail!("fp8: {:?} x [{o}, {i}] (back: {back})", x.shape());
    }
    let x = &x.contiguous_rows()?;
    let device = x.real()?.device().as_cuda_device()?;
    let by_row = library::by_row(device)?;
    let parts = empty(x, PARTS, DType::F32)?;
    let w = weight(source, back, x, &parts)?;
    let (format, kind) = if back { ("e5m2", E5M2) } else { ("e4m3", E4M3) };
    let rows = rows(x, format, (!by_row).then_some(&parts))?;
    let (out, add, more) = match sum {
        Some(sum) if takes(&sum) => (sum, true, None),
        sum => (empty(x, (t, outputs), DType::BF16)?, false, sum),
    };
    let workspace = empty(x, WORKSPACE, DType::U8)?;
    let place = at(out.real()?)?;
    let shape = Shape {
        rows: t,
        inner,
        outputs,
        apart: row_stride(out.layout()).unwrap_or(outputs),
        kind,
        add,
        by_row,
        aligned: 1 << place.trailing_zeros().min(8),
    };
    let places = Places {
        weight: address_of(&w.values)?,
        weight_scales: address_of(&w.scales)?,
        rows: address_of(&rows.values)?,
        row_scales: address_of(&rows.scales)?,
        out: place,
        workspace: address_of(&workspace)?,
    };
    // SAFETY: operands, scales and result were made above in these sizes and live until the call returns; memory is
    // freed in the order of the stream, and the driver's pool aligns allocations to 256 bytes.
    unsafe { library::product(device, shape, places) }?;
    match more {
        None => Ok(out),
        Some(sum) => sum + out,
    }
}
