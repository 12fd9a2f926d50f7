//! Dequantizing and products on CUDA.
//!
//! A product dequantizes a tile of the matrix into one buffer that all its tiles use, and multiplies it by cuBLAS
//! before the next one is dequantized: forward takes tiles of rows of W, backward tiles of columns, so that each is a
//! product over the whole inner dimension, written where it belongs, and nothing is summed across tiles. A few
//! tokens need no tile: `rows.cu` multiplies from the codes.
//!
//! **None of this has run on a GPU.** `tests/cuda` runs the kernels' sources on the host, `examples/gpu_check` is
//! what a machine with a GPU is to run.

use super::tiles::{self, FEW, ROWS, ROWS_THREADS, THREADS, Tile, name};
use super::{QuantizedMatrix, Scales};
use crate::kernel::Tensor;
use crate::kernel::cuda::gemm::{Mat, gemm};
use crate::kernel::cuda::module;
use crate::kernel::cuda::slices::{self, Number, Operand, in_place, on_number};
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, CudaViewMut, DevicePtr, LaunchArgs, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};
use std::ops::Range;

/// Values of a matrix from which the number of a block would need more than 32 bits.
const TOO_MANY: usize = 1 << 37;

/// Whether the kernels dequantize this matrix; candle's operations do otherwise.
pub fn dequantizes(w: &QuantizedMatrix) -> bool {
    w.packed.real().is_ok_and(|p| p.device().is_cuda())
        && slices::has(w.compute)
        && w.block.is_power_of_two()
        && w.block >= 32
        && w.rows * w.cols < TOO_MANY
}

/// Whether the kernels multiply `x` and this matrix.
pub fn multiplies(w: &QuantizedMatrix, x: &Tensor) -> bool {
    dequantizes(w) && x.dtype() == w.compute
}

/// The matrix's parts, held for reading while kernels are launched.
struct Parts<'a> {
    w: &'a QuantizedMatrix,
    packed: Operand<'a>,
    pairs: Operand<'a>,
    /// Of blocks; with double quantization of groups.
    scales: Operand<'a>,
    nested: Option<(Operand<'a>, Operand<'a>, u32, f32)>,
}

/// The same as the kernels' first nine arguments.
struct Arguments<'a> {
    packed: CudaView<'a, u8>,
    pairs: CudaView<'a, f32>,
    scales: CudaView<'a, f32>,
    nested: Option<(CudaView<'a, u8>, CudaView<'a, f32>)>,
    null: u64,
    group: u32,
    offset: f32,
    shift: u32,
    total: u64,
}

impl<'a> Parts<'a> {
    fn of(w: &'a QuantizedMatrix) -> Result<Self> {
        let (scales, nested) = match &w.scales {
            Scales::Plain(s) => (s, None),
            Scales::Nested { codes, map, absmax, group, offset } => {
                let group = u32::try_from(*group).map_err(candle_core::Error::wrap)?;
                (absmax, Some((Operand::of(codes.real()?)?, Operand::of(map.real()?)?, group, *offset)))
            }
        };
        Ok(Self {
            w,
            packed: Operand::of(w.packed.real()?)?,
            pairs: Operand::of(w.book.pairs.real()?)?,
            scales: Operand::of(scales.real()?)?,
            nested,
        })
    }

    fn arguments(&self) -> Result<Arguments<'_>> {
        Ok(Arguments {
            packed: self.packed.view()?,
            pairs: self.pairs.view()?,
            scales: self.scales.view()?,
            nested: match &self.nested {
                Some((codes, map, _, _)) => Some((codes.view()?, map.view()?)),
                None => None,
            },
            null: 0,
            group: self.nested.as_ref().map_or(1, |n| n.2),
            offset: self.nested.as_ref().map_or(0.0, |n| n.3),
            shift: self.w.block.trailing_zeros(),
            total: (self.w.rows * self.w.cols) as u64,
        })
    }
}

impl Arguments<'_> {
    /// `struct Matrix` of codes.cuh.
    fn push<'b, 'c: 'b>(&'c self, launch: &mut LaunchArgs<'b>) {
        launch.arg(&self.packed).arg(&self.pairs).arg(&self.scales);
        match &self.nested {
            Some((codes, map)) => launch.arg(codes).arg(map),
            None => launch.arg(&self.null).arg(&self.null),
        };
        launch.arg(&self.group).arg(&self.offset).arg(&self.shift).arg(&self.total);
    }
}

/// A launch in one dimension.
fn grid(blocks: u32, threads: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}

fn narrow(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(candle_core::Error::wrap)
}

/// Dequantizes a tile into the beginning of `out`.
fn dequantize_tile<T: Number>(
    device: &CudaDevice,
    a: &Arguments<'_>,
    source: DType,
    tile: Tile,
    out: &mut CudaSlice<T>,
) -> Result<()> {
    if tile.is_empty() {
        return Ok(());
    }
    if tile.end() as u64 > a.total || tile.len() > out.len() {
        candle_core::bail!("4-bit blocks: {tile:?} of {} values into {}", a.total, out.len());
    }
    let (chunks, runs) = (narrow(tile.chunks())?, narrow(tile.runs)?);
    let blocks = narrow(tile.blocks())?;
    let (first, stride, width) = (tile.first as u64, tile.stride as u64, tile.width as u64);
    let f = module::DEQUANTIZE.function(device, &name("dequantize", source, T::DTYPE))?;
    let stream = device.cuda_stream();
    let mut launch = stream.launch_builder(&f);
    a.push(&mut launch);
    launch.arg(&first).arg(&stride).arg(&width).arg(&runs).arg(&chunks).arg(out);
    // SAFETY: the arguments are those of dequantize.cu, in order and type; the tile was found to lie inside of the
    // matrix, whose parts QuantizedMatrix::new has found to belong together, and inside of `out`.
    unsafe { launch.launch(grid(blocks, THREADS)) }.w()?;
    Ok(())
}

/// Some dequantized rows, in the compute dtype.
pub fn dequantize(w: &QuantizedMatrix, rows: Range<usize>) -> Result<Tensor> {
    on_number!(w.compute, dequantize_rows(w, rows))
}

fn dequantize_rows<T: Number>(w: &QuantizedMatrix, rows: Range<usize>) -> Result<Tensor> {
    let device = w.packed.real()?.device().as_cuda_device()?;
    let parts = Parts::of(w)?;
    let shape = (rows.len(), w.cols);
    // SAFETY: the kernel writes every value.
    let mut out = unsafe { device.alloc::<T>(rows.len() * w.cols) }?;
    dequantize_tile(device, &parts.arguments()?, w.source, Tile::rows(w.dims(), rows), &mut out)?;
    Ok(slices::tensor(out, shape, device).into())
}

/// Most bytes of a tile on this device.
fn tile_bytes(device: &CudaDevice, tokens: usize) -> Result<usize> {
    let what = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
    let cache = device.cuda_stream().context().attribute(what).w()?;
    Ok(tiles::bytes(tokens, Some(usize::try_from(cache).unwrap_or(0))))
}

/// Calls `multiply(range, tile, device)` for each tile of `count` rows (or columns) of `size` values, dequantized to
/// one buffer in turn.
fn by_tiles<T: Number>(
    w: &QuantizedMatrix,
    tokens: usize,
    (count, size): (usize, usize),
    tile: impl Fn((usize, usize), Range<usize>) -> Tile,
    mut multiply: impl FnMut(Range<usize>, &CudaView<'_, T>, &CudaDevice) -> Result<()>,
) -> Result<()> {
    let device = w.packed.real()?.device().as_cuda_device()?;
    let parts = Parts::of(w)?;
    let arguments = parts.arguments()?;
    let ranges: Vec<_> = tiles::split(count, size * size_of::<T>(), tile_bytes(device, tokens)?).collect();
    let widest = ranges.iter().map(|r| r.len()).max().unwrap_or(0);
    // SAFETY: what is read was written by the kernel before.
    let mut buffer = unsafe { device.alloc::<T>(widest * size) }?;
    for range in ranges {
        let tile = tile(w.dims(), range.clone());
        dequantize_tile(device, &arguments, w.source, tile, &mut buffer)?;
        multiply(range, &buffer.slice(..tile.len()), device)?;
    }
    Ok(())
}

/// [`QuantizedMatrix::forward`].
pub fn forward(w: &QuantizedMatrix, x: &Tensor) -> Result<Tensor> {
    on_number!(w.compute, forward_typed(w, x))
}

fn forward_typed<T: Number>(w: &QuantizedMatrix, x: &Tensor) -> Result<Tensor> {
    let (t, k) = x.dims2()?;
    if k != w.cols {
        candle_core::bail!("4-bit blocks: {:?} x [{}, {}]^T", x.shape(), w.rows, w.cols);
    }
    if t == 0 {
        return Tensor::zeros((0, w.rows), x.dtype(), x.device());
    }
    let x = x.contiguous()?;
    let x = x.real()?;
    let device = x.device().as_cuda_device()?;
    let held = Operand::of(x)?;
    let xv = held.view::<T>()?;
    // SAFETY: the kernel, or the products of all tiles together, write every value.
    let mut y = unsafe { device.alloc::<T>(t * w.rows) }?;
    if t <= FEW && few_tokens(device, w, &xv, t, &mut y)? {
        return Ok(slices::tensor(y, (t, w.rows), device).into());
    }
    let a = Mat { data: &xv, rows: t, cols: k, transposed: false };
    by_tiles::<T>(w, t, (w.rows, w.cols), Tile::rows, |rows, tile, device| {
        let b = Mat { data: tile, rows: k, cols: rows.len(), transposed: true };
        gemm(device, &mut y.slice_mut(rows.start..), w.rows, false, &a, &b, 1.0)
    })?;
    Ok(slices::tensor(y, (t, w.rows), device).into())
}

/// `y = x W^T` straight from the codes; `false` if rows.cu does not take these shapes, and nothing was done.
fn few_tokens<T: Number>(
    device: &CudaDevice,
    w: &QuantizedMatrix,
    x: &CudaView<'_, T>,
    tokens: usize,
    y: &mut CudaSlice<T>,
) -> Result<bool> {
    let Some((upto, rows)) = ROWS.into_iter().find(|(upto, _)| tokens <= *upto) else { return Ok(false) };
    let parts = Parts::of(w)?;
    let a = parts.arguments()?;
    let stream = device.cuda_stream();
    let aligned =
        x.device_ptr(&stream).0.is_multiple_of(16) && a.packed.device_ptr(&stream).0.is_multiple_of(4);
    if !aligned || !w.cols.is_multiple_of(32) || x.len() < tokens * w.cols || y.len() < tokens * w.rows {
        return Ok(false);
    }
    let (t, count, cols) = (narrow(tokens)?, w.rows as u64, w.cols as u64);
    let kernel = format!("{}_{upto}", name("rows", w.source, T::DTYPE));
    let f = module::ROWS.function(device, &kernel)?;
    let mut launch = stream.launch_builder(&f);
    a.push(&mut launch);
    launch.arg(x).arg(&t).arg(&count).arg(&cols).arg(y);
    // SAFETY: the arguments are those of rows.cu, in order and type; what it demands of sizes and addresses was
    // checked above, and QuantizedMatrix::new has found that the matrix's parts belong together.
    unsafe { launch.launch(grid(narrow(w.rows.div_ceil(rows))?, ROWS_THREADS)) }.w()?;
    Ok(true)
}

/// [`QuantizedMatrix::backward`].
pub fn backward(w: &QuantizedMatrix, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
    on_number!(w.compute, backward_typed(w, dy, dx))
}

fn backward_typed<T: Number>(w: &QuantizedMatrix, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
    let (t, k) = dy.dims2()?;
    if k != w.rows || dx.as_ref().is_some_and(|dx| dx.dims() != [t, w.cols]) {
        candle_core::bail!("4-bit blocks: {:?} x [{}, {}]", dy.shape(), w.rows, w.cols);
    }
    let dy = dy.contiguous()?;
    let dy = dy.real()?;
    let device = dy.device().as_cuda_device()?;
    let held = Operand::of(dy)?;
    let dyv = held.view::<T>()?;
    let a = Mat { data: &dyv, rows: t, cols: k, transposed: false };
    let product = |dst: &mut CudaViewMut<'_, T>, add: bool| {
        by_tiles::<T>(w, t, (w.cols, w.rows), Tile::columns, |columns, tile, device| {
            let b = Mat { data: tile, rows: k, cols: columns.len(), transposed: false };
            gemm(device, &mut dst.slice_mut(columns.start..), w.cols, add, &a, &b, 1.0)
        })
    };
    match dx {
        Some(dx) if dx.dtype() == T::DTYPE && dx.is_contiguous() && t > 0 => {
            in_place::<T>("4-bit backward", dx.real()?, |dst| product(dst, true))?;
            Ok(dx)
        }
        dx => {
            // SAFETY: the products of all tiles together write every value.
            let mut out = unsafe { device.alloc::<T>(t * w.cols) }?;
            if t > 0 {
                product(&mut out.slice_mut(..), false)?;
            }
            let own = Tensor::Real(slices::tensor(out, (t, w.cols), device));
            match dx {
                None => Ok(own),
                Some(dx) => dx + own,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names that exist in the sources, for every pair of dtypes.
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
