//! Decoding and products on CUDA.
//!
//! A product decodes a panel of the matrix into one buffer that all its panels use, and multiplies it by cuBLAS
//! before the next one is decoded: forward takes panels of rows of W, backward panels of columns, so that each is a
//! product over the whole inner dimension, written where it belongs, and nothing is summed across panels. A few
//! tokens need no panel: `rows.cu` multiplies from the codes.
//!
//! **None of this has run on a GPU.** `tests/cuda` runs the kernels' sources on the host, `examples/gpu_check` is
//! what a machine with a GPU is to run.

use super::panels::{self, FEW, Panel, ROWS, ROWS_THREADS, THREADS, name};
use super::{Blocks, Scales};
use crate::kernel::Tensor;
use crate::kernel::cuda::gemm::{Mat, gemm};
use crate::kernel::cuda::module;
use crate::kernel::cuda::slices::{self, Held, Number, in_place, on_number};
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, CudaViewMut, DevicePtr, LaunchArgs, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};
use std::ops::Range;

/// Values of a matrix from which the number of a block would need more than 32 bits.
const TOO_MANY: usize = 1 << 37;

/// Whether the kernels decode this matrix; candle's operations do otherwise.
pub fn decodes(w: &Blocks) -> bool {
    w.packed.real().is_ok_and(|p| p.device().is_cuda())
        && slices::has(w.compute)
        && w.block.is_power_of_two()
        && w.block >= 32
        && w.rows * w.cols < TOO_MANY
}

/// Whether the kernels multiply `x` and this matrix.
pub fn multiplies(w: &Blocks, x: &Tensor) -> bool {
    decodes(w) && x.dtype() == w.compute
}

/// The matrix's parts, held for reading while kernels are launched.
struct Parts<'a> {
    w: &'a Blocks,
    packed: Held<'a>,
    pairs: Held<'a>,
    /// Of blocks; with double quantization of groups.
    scales: Held<'a>,
    nested: Option<(Held<'a>, Held<'a>, u32, f32)>,
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
    fn of(w: &'a Blocks) -> Result<Self> {
        let (scales, nested) = match &w.scales {
            Scales::Plain(s) => (s, None),
            Scales::Nested { codes, map, absmax, group, offset } => {
                let group = u32::try_from(*group).map_err(candle_core::Error::wrap)?;
                (absmax, Some((Held::of(codes.real()?)?, Held::of(map.real()?)?, group, *offset)))
            }
        };
        Ok(Self {
            w,
            packed: Held::of(w.packed.real()?)?,
            pairs: Held::of(w.book.pairs.real()?)?,
            scales: Held::of(scales.real()?)?,
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

/// Decodes a panel into the beginning of `out`.
fn decode_panel<T: Number>(
    device: &CudaDevice,
    a: &Arguments<'_>,
    source: DType,
    panel: Panel,
    out: &mut CudaSlice<T>,
) -> Result<()> {
    if panel.len() == 0 {
        return Ok(());
    }
    if panel.end() as u64 > a.total || panel.len() > out.len() {
        candle_core::bail!("4-bit blocks: {panel:?} of {} values into {}", a.total, out.len());
    }
    let (chunks, runs) = (narrow(panel.chunks())?, narrow(panel.runs)?);
    let blocks = narrow(panel.blocks())?;
    let (first, stride, width) = (panel.first as u64, panel.stride as u64, panel.width as u64);
    let f = module::DECODE.function(device, &name("decode", source, T::DTYPE))?;
    let stream = device.cuda_stream();
    let mut launch = stream.launch_builder(&f);
    a.push(&mut launch);
    launch.arg(&first).arg(&stride).arg(&width).arg(&runs).arg(&chunks).arg(out);
    // SAFETY: the arguments are those of decode.cu, in order and type; the panel was found to lie inside of the
    // matrix, whose parts Blocks::new has found to belong together, and inside of `out`.
    unsafe { launch.launch(grid(blocks, THREADS)) }.w()?;
    Ok(())
}

/// Some decoded rows, in the compute dtype.
pub fn decode(w: &Blocks, rows: Range<usize>) -> Result<Tensor> {
    on_number!(w.compute, decode_rows(w, rows))
}

fn decode_rows<T: Number>(w: &Blocks, rows: Range<usize>) -> Result<Tensor> {
    let device = w.packed.real()?.device().as_cuda_device()?;
    let parts = Parts::of(w)?;
    let shape = (rows.len(), w.cols);
    // SAFETY: the kernel writes every value.
    let mut out = unsafe { device.alloc::<T>(rows.len() * w.cols) }?;
    decode_panel(device, &parts.arguments()?, w.source, Panel::rows(w.dims(), rows), &mut out)?;
    Ok(slices::tensor(out, shape, device).into())
}

/// Bytes of a panel on this device.
fn panel_bytes(device: &CudaDevice) -> Result<usize> {
    let what = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
    let cache = device.cuda_stream().context().attribute(what).w()?;
    Ok(panels::bytes(usize::try_from(cache).unwrap_or(0)))
}

/// Calls `multiply(range, panel, device)` for each panel of `count` rows (or columns) of `size` values, decoded to
/// one buffer in turn.
fn by_panels<T: Number>(
    w: &Blocks,
    (count, size): (usize, usize),
    panel: impl Fn((usize, usize), Range<usize>) -> Panel,
    mut multiply: impl FnMut(Range<usize>, &CudaView<'_, T>, &CudaDevice) -> Result<()>,
) -> Result<()> {
    let device = w.packed.real()?.device().as_cuda_device()?;
    let parts = Parts::of(w)?;
    let arguments = parts.arguments()?;
    let ranges: Vec<_> = panels::split(count, size * size_of::<T>(), panel_bytes(device)?).collect();
    let widest = ranges.iter().map(|r| r.len()).max().unwrap_or(0);
    // SAFETY: what is read was written by the kernel before.
    let mut buffer = unsafe { device.alloc::<T>(widest * size) }?;
    for range in ranges {
        let panel = panel(w.dims(), range.clone());
        decode_panel(device, &arguments, w.source, panel, &mut buffer)?;
        multiply(range, &buffer.slice(..panel.len()), device)?;
    }
    Ok(())
}

/// [`Blocks::forward`].
pub fn forward(w: &Blocks, x: &Tensor) -> Result<Tensor> {
    on_number!(w.compute, forward_typed(w, x))
}

fn forward_typed<T: Number>(w: &Blocks, x: &Tensor) -> Result<Tensor> {
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
    let held = Held::of(x)?;
    let xv = held.view::<T>()?;
    // SAFETY: the kernel, or the products of all panels together, write every value.
    let mut y = unsafe { device.alloc::<T>(t * w.rows) }?;
    if t <= FEW && few_tokens(device, w, &xv, t, &mut y)? {
        return Ok(slices::tensor(y, (t, w.rows), device).into());
    }
    let a = Mat { data: &xv, rows: t, cols: k, transposed: false };
    by_panels::<T>(w, (w.rows, w.cols), Panel::rows, |rows, panel, device| {
        let b = Mat { data: panel, rows: k, cols: rows.len(), transposed: true };
        gemm(device, &mut y.slice_mut(rows.start..), w.rows, false, &a, &b, 1.0)
    })?;
    Ok(slices::tensor(y, (t, w.rows), device).into())
}

/// `y = x W^T` straight from the codes; `false` if rows.cu does not take these shapes, and nothing was done.
fn few_tokens<T: Number>(
    device: &CudaDevice,
    w: &Blocks,
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
    // checked above, and Blocks::new has found that the matrix's parts belong together.
    unsafe { launch.launch(grid(narrow(w.rows.div_ceil(rows))?, ROWS_THREADS)) }.w()?;
    Ok(true)
}

/// [`Blocks::backward`].
pub fn backward(w: &Blocks, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
    on_number!(w.compute, backward_typed(w, dy, dx))
}

fn backward_typed<T: Number>(w: &Blocks, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
    let (t, k) = dy.dims2()?;
    if k != w.rows || dx.as_ref().is_some_and(|dx| dx.dims() != [t, w.cols]) {
        candle_core::bail!("4-bit blocks: {:?} x [{}, {}]", dy.shape(), w.rows, w.cols);
    }
    let dy = dy.contiguous()?;
    let dy = dy.real()?;
    let device = dy.device().as_cuda_device()?;
    let held = Held::of(dy)?;
    let dyv = held.view::<T>()?;
    let a = Mat { data: &dyv, rows: t, cols: k, transposed: false };
    let product = |dst: &mut CudaViewMut<'_, T>, add: bool| {
        by_panels::<T>(w, (w.cols, w.rows), Panel::columns, |columns, panel, device| {
            let b = Mat { data: panel, rows: k, cols: columns.len(), transposed: false };
            gemm(device, &mut dst.slice_mut(columns.start..), w.cols, add, &a, &b, 1.0)
        })
    };
    match dx {
        Some(dx) if dx.dtype() == T::DTYPE && dx.is_contiguous() && t > 0 => {
            in_place::<T>("4-bit backward", dx.real()?, |dst| product(dst, true))?;
            Ok(dx)
        }
        dx => {
            // SAFETY: the products of all panels together write every value.
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
                let decode = name("decode", source, compute);
                assert!(module::DECODE.ptx.contains(&format!(".entry {decode}(")), "{decode}");
                for (upto, _) in ROWS {
                    let rows = format!("{}_{upto}", name("rows", source, compute));
                    assert!(module::ROWS.ptx.contains(&format!(".entry {rows}(")), "{rows}");
                }
            }
        }
    }
}
