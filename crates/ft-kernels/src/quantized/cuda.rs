//! Dequantization and products on CUDA.
//!
//! A product alternates between dequantizing a tile of the matrix into a reused buffer and multiplying it
//! by cuBLAS: tiles of rows of W in forward, tiles of columns in backward. Each tile spans the full inner
//! dimension and is written to its final place, so nothing is summed across tiles. Adapter matrices
//! extend the inner dimension: they are copied to the right of the tile's rows or below its columns
//! (`crate::padded`). For a few tokens, `rows.cu` multiplies directly from the codes.
//!
//! `tests/cuda` runs the kernels on the host, `examples/gpu_check` on a GPU.

use super::matrix::{QuantizedMatrix, Scales};
use super::tiles::{self, FEW, ROWS, ROWS_THREADS, THREADS, Tile, name};
use crate::Tensor;
use crate::cuda::gemm::{Precision, gemm};
use crate::cuda::launch::{Argument, Grid, Launch, address_of, args, compiled, empty};
use crate::padded;
use crate::tensor::row_stride;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute;
use candle_core::{DType, Result};
use std::ops::Range;

/// Matrix size, in values, at which block indices overflow 32 bits.
const TOO_MANY: usize = 1 << 37;

/// Whether the kernels support this matrix; otherwise candle operations dequantize it.
pub fn dequantizes(w: &QuantizedMatrix) -> bool {
    w.packed.real().is_ok_and(|p| p.device().is_cuda())
        && matches!(w.compute, DType::F32 | DType::BF16 | DType::F16)
        && w.block.is_power_of_two()
        && w.block >= 32
        && w.rows * w.cols < TOO_MANY
}

/// Whether the kernels multiply `x` with this matrix.
pub fn multiplies(w: &QuantizedMatrix, x: &Tensor) -> bool {
    dequantizes(w) && x.dtype() == w.compute
}

/// Adapter part appended to a tile: none, a slice of B to the right, or a slice of A below.
#[derive(Clone, Copy)]
enum AdapterPart<'a> {
    None,
    Beside(&'a Tensor),
    Below(&'a Tensor),
}

/// Pushes the fields of `struct Matrix` in codes.cuh as the first arguments.
pub fn launch<'a>(w: &'a QuantizedMatrix, launch: Launch<'a>) -> Result<Launch<'a>> {
    let launch = launch.with(args![&w.packed, &w.book.pairs])?;
    let (launch, group, offset) = match &w.scales {
        Scales::Plain(s) => (launch.with(args![s, Argument::Null, Argument::Null])?, 1, 0.0),
        Scales::Nested { codes, map, absmax, group, offset } => {
            (launch.with(args![absmax, codes, map])?, *group, *offset)
        }
    };
    launch.with(args![group, offset, w.block.trailing_zeros(), (w.rows * w.cols) as u64])
}

/// Dequantizes a tile to the start of `out`, with a run stride of `apart` values.
fn dequantize_tile(
    w: &QuantizedMatrix,
    tile: Tile,
    apart: usize,
    low: AdapterPart<'_>,
    out: &Tensor,
) -> Result<()> {
    if tile.is_empty() {
        return Ok(());
    }
    // the adapter matrix, the offset of the slice, and (rows, columns, stride, destination)
    let (m, from, [rows, cols, stride, to]) = match low {
        AdapterPart::None => (None, 0, [0; 4]),
        AdapterPart::Beside(b) => (Some(b), 0, [b.dim(0)?, b.dim(1)?, b.dim(1)?, tile.width]),
        AdapterPart::Below(a) => (Some(a), tile.first, [a.dim(0)?, tile.width, a.dim(1)?, tile.runs * apart]),
    };
    let fits = match low {
        AdapterPart::None => true,
        AdapterPart::Beside(_) => rows == tile.runs && apart >= tile.width + cols,
        AdapterPart::Below(_) => stride == tile.stride && from + cols <= stride,
    };
    let values = ((tile.runs - 1) * apart + tile.width).max(match rows {
        0 => 0,
        rows => to + (rows - 1) * apart + cols,
    });
    if tile.end() > w.rows * w.cols || apart < tile.width || !fits || values > out.elem_count() {
        candle_core::bail!("4-bit blocks: {tile:?} of {:?} into {:?}", w.dims(), out.shape());
    }
    if m.is_some_and(|m| m.dtype() != w.compute) {
        candle_core::bail!("4-bit blocks in {:?} with an adapter of another type", w.compute);
    }
    let m = m.map(|m| m.flatten_all()?.narrow(0, from, m.elem_count() - from)).transpose()?;
    let kernel = name("dequantize", w.source, w.compute);
    let launch = launch(w, Launch::named(out, compiled!(DEQUANTIZE), kernel)?)?;
    let launch = launch.with(args![tile.first as u64, tile.stride as u64, tile.width as u64, tile.runs])?;
    let launch = launch.with(args![tile.chunks(), apart as u64, m.as_ref(), rows, cols, stride as u64])?;
    let launch = launch.with(args![to as u64, out])?;
    // SAFETY: the tile was checked to lie inside the matrix, and with the adapter part inside `out`;
    // QuantizedMatrix::new has checked the sizes of the matrix's parts.
    unsafe { launch.run(Grid::new(tile.blocks(rows * cols), THREADS)) }
}

/// Dequantizes rows in the compute dtype, with a row stride of `apart` values and `below` extra
/// uninitialized rows.
pub fn dequantize(w: &QuantizedMatrix, rows: Range<usize>, (below, apart): (usize, usize)) -> Result<Tensor> {
    let out = empty(&w.packed, (rows.len() + below, apart), w.compute)?;
    let tile = if apart == w.cols { Tile::rows(w.dims(), rows) } else { Tile::rows_apart(w.dims(), rows) };
    dequantize_tile(w, tile, apart.max(tile.width), AdapterPart::None, &out)?;
    Ok(out)
}

/// Maximum bytes of a tile on this device.
fn tile_bytes(w: &QuantizedMatrix, tokens: usize) -> Result<usize> {
    let what = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
    let device = w.packed.real()?.device().as_cuda_device()?;
    let cache = device.cuda_stream().context().attribute(what).w()?;
    Ok(tiles::bytes(tokens, Some(usize::try_from(cache).unwrap_or(0))))
}

/// Tiles over `count` rows (or columns) of `size` values each, and a buffer for the widest.
fn tiles(
    w: &QuantizedMatrix,
    tokens: usize,
    count: usize,
    size: usize,
) -> Result<(Vec<Range<usize>>, Tensor)> {
    let most = tile_bytes(w, tokens)?;
    let ranges: Vec<_> = tiles::split(count, size * w.compute.size_in_bytes(), most).collect();
    let widest = ranges.iter().map(|r| r.len()).max().unwrap_or(0);
    Ok((ranges, empty(&w.packed, widest * size, w.compute)?))
}

/// See [`QuantizedMatrix::forward_with`].
pub fn forward(w: &QuantizedMatrix, x: &Tensor, b: Option<&Tensor>) -> Result<Tensor> {
    let ((t, k), rank) = (x.dims2()?, b.map_or(Ok(0), |b| b.dim(1))?);
    if k != w.cols + rank || b.is_some_and(|b| b.dims() != [w.rows, rank]) {
        let of = b.map(Tensor::shape);
        candle_core::bail!("4-bit blocks: {:?} x [{}, {}]^T with {of:?}", x.shape(), w.rows, w.cols);
    }
    let x = x.contiguous_rows()?;
    // the kernel, or the tiles together, write every value
    let y = empty(&x, (t, w.rows), x.dtype())?;
    if t == 0 || (t <= FEW && rank == 0 && few_tokens(w, &x, &y)?) {
        return Ok(y);
    }
    let apart = padded::stride(w.cols, rank);
    let (ranges, buffer) = tiles(w, t, w.rows, apart)?;
    for rows in ranges {
        let part = b.map(|b| b.narrow(0, rows.start, rows.len())).transpose()?;
        let (tile, low) = match &part {
            None => (Tile::rows(w.dims(), rows.clone()), AdapterPart::None),
            Some(b) => (Tile::rows_apart(w.dims(), rows.clone()), AdapterPart::Beside(b)),
        };
        dequantize_tile(w, tile, if rank == 0 { tile.width } else { apart }, low, &buffer)?;
        let values = buffer.narrow(0, 0, rows.len() * apart)?.reshape((rows.len(), apart))?;
        let values = values.narrow(1, 0, k)?;
        let to = y.narrow(1, rows.start, rows.len())?;
        gemm((to.real()?, false), (x.real()?, false), (values.real()?, true), 1.0, Precision::F32)?;
    }
    Ok(y)
}

/// `y = x W^T` directly from the codes. Returns `false`, without doing anything, if rows.cu does not
/// support the shapes.
fn few_tokens(w: &QuantizedMatrix, x: &Tensor, y: &Tensor) -> Result<bool> {
    let tokens = x.dim(0)?;
    let Some((upto, rows)) = ROWS.into_iter().find(|(upto, _)| tokens <= *upto) else { return Ok(false) };
    if !x.is_contiguous() || !w.cols.is_multiple_of(32) {
        return Ok(false);
    }
    if !address_of(x)?.is_multiple_of(16) || !address_of(&w.packed)?.is_multiple_of(4) {
        return Ok(false);
    }
    let kernel = format!("{}_{upto}", name("rows", w.source, w.compute));
    let launch = launch(w, Launch::named(x, compiled!(ROWS), kernel)?)?;
    let launch = launch.with(args![x, tokens, w.rows as u64, w.cols as u64, y])?;
    // SAFETY: x is [tokens, cols], y is [tokens, rows]; sizes and alignment required by rows.cu were
    // checked above; QuantizedMatrix::new has checked the sizes of the matrix's parts.
    unsafe { launch.run(Grid::new(w.rows.div_ceil(rows), ROWS_THREADS)) }?;
    Ok(true)
}

/// See [`QuantizedMatrix::backward_with`].
pub fn backward(w: &QuantizedMatrix, dy: &Tensor, a: Option<&Tensor>, dx: Option<Tensor>) -> Result<Tensor> {
    let ((t, k), rank) = (dy.dims2()?, a.map_or(Ok(0), |a| a.dim(0))?);
    if k != w.rows + rank
        || a.is_some_and(|a| a.dims() != [rank, w.cols])
        || dx.as_ref().is_some_and(|dx| dx.dims() != [t, w.cols])
    {
        let of = a.map(Tensor::shape);
        candle_core::bail!("4-bit blocks: {:?} x [{}, {}] with {of:?}", dy.shape(), w.rows, w.cols);
    }
    let dy = dy.contiguous_rows()?;
    let own = |dx: &Tensor| dx.dtype() == w.compute && row_stride(dx.layout()).is_some();
    let (out, add, more) = match dx {
        Some(dx) if own(&dx) => (dx, true, None),
        // the tiles together write every value
        dx => (empty(&dy, (t, w.cols), w.compute)?, false, dx),
    };
    if t > 0 {
        let (ranges, buffer) = tiles(w, t, w.cols, k)?;
        for columns in ranges {
            let (width, to) = (columns.len(), out.narrow(1, columns.start, columns.len())?);
            let (tile, low) = match a {
                None => (Tile::columns(w.dims(), columns), AdapterPart::None),
                Some(a) => (Tile::columns_apart(w.dims(), columns), AdapterPart::Below(a)),
            };
            dequantize_tile(w, tile, tile.width, low, &buffer)?;
            let values = buffer.narrow(0, 0, k * width)?.reshape((k, width))?;
            gemm((to.real()?, add), (dy.real()?, false), (values.real()?, false), 1.0, Precision::F32)?;
        }
    }
    match more {
        None => Ok(out),
        Some(dx) => dx + out,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::module;

    /// Kernel names exist in the compiled sources for every pair of dtypes.
    #[test]
    fn every_kernel_is_compiled() {
        let floats = [DType::F32, DType::BF16, DType::F16];
        for source in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            for compute in floats {
                let dequantize = name("dequantize", source, compute);
                assert!(module::DEQUANTIZE.ptx.contains(&format!(".entry {dequantize}(")), "{dequantize}");
                for (upto, _) in ROWS {
                    let rows = format!("{}_{upto}", name("rows", source, compute));
                    assert!(module::ROWS.ptx.contains(&format!(".entry {rows}(")), "{rows}");
                }
            }
        }
    }
}
