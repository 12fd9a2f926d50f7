//! A matrix of 4-bit codes in blocks, and products with it that never hold the decoded matrix.
//!
//! Value `n` (row-major) is `code[c_n] * scale[n / block]`, rounded to the dtype that the matrix had before it
//! was quantized and then to the compute dtype: what bitsandbytes decodes, bit for bit. Scales are f32, or
//! (double quantization) 8-bit codes of a map, times a factor a group of scales, plus an offset.
//!
//! On the CPU a product decodes a panel of the matrix that fits a core's second-level cache, multiplies, and
//! goes on: forward takes panels of rows of W, backward panels of columns, so that each is one product over
//! the whole inner dimension and nothing is summed across panels. On other devices the matrix is decoded by
//! candle's operations and multiplied whole; the decoded copy lives as long as the product.

use super::cpu::{Real, View, dot, in_place, is_cpu, on_real, tensor, view};
use super::gemm::{self, Mat};
use candle_core::{DType, Device, Result, Storage, StorageRef, Tensor};
use rayon::prelude::*;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Values of a panel: 512 KiB of f32, so that it stays in a core's cache beside what it is multiplied with.
const PANEL: usize = 1 << 17;
/// Fewest columns of a product that one panel makes; a multiple of 64 keeps backward's panels on whole blocks.
const NARROWEST: usize = 64;
/// Values that a decode by candle's operations takes at a time: 64 MiB of f32 for each temporary.
const CHUNK: usize = 1 << 24;

/// What the 16 codes stand for, shared by all matrices of a model.
#[derive(Debug)]
pub struct Codebook {
    code: [f32; 16],
    /// The two values of each byte [256, 2], f32.
    pairs: Tensor,
}

impl Codebook {
    /// The codebook of 16 values, on `device`.
    pub fn new(code: [f32; 16], device: &Device) -> Result<Self> {
        let pairs: Vec<f32> = (0..256usize).flat_map(|b| [code[b >> 4], code[b & 15]]).collect();
        Ok(Self { code, pairs: Tensor::from_vec(pairs, (256, 2), device)? })
    }
}

/// The scale of each block.
#[derive(Clone, Debug)]
pub enum Scales {
    /// `[blocks]`, f32.
    Plain(Tensor),
    /// `map[codes[b]] * absmax[b / group] + offset`.
    Nested {
        /// `[blocks]`, u8.
        codes: Tensor,
        /// `[256]`, f32.
        map: Tensor,
        /// `[groups]`, f32.
        absmax: Tensor,
        /// Scales a group.
        group: usize,
        /// Mean of the scales.
        offset: f32,
    },
}

/// A matrix [rows, cols] in blocks of 4-bit codes.
#[derive(Clone, Debug)]
pub struct Blocks {
    rows: usize,
    cols: usize,
    block: usize,
    /// Two codes a byte, the first in its upper half: [values / 2, rounded up], u8.
    packed: Tensor,
    scales: Scales,
    book: Arc<Codebook>,
    /// Decoded values are rounded to this first ...
    source: DType,
    /// ... and then to this.
    compute: DType,
}

impl Blocks {
    /// A matrix from its parts, on the device where they are.
    ///
    /// # Errors
    /// Parts whose sizes do not belong together: a bug of the caller, who has checked what files say.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        (rows, cols): (usize, usize),
        block: usize,
        packed: Tensor,
        scales: Scales,
        book: Arc<Codebook>,
        source: DType,
        compute: DType,
    ) -> Result<Self> {
        let n = rows * cols;
        let blocks = n.div_ceil(block.max(1));
        let scales_fit = match &scales {
            Scales::Plain(s) => s.elem_count() == blocks,
            Scales::Nested { codes, map, absmax, group, .. } => {
                codes.elem_count() == blocks
                    && map.elem_count() == 256
                    && *group > 0
                    && absmax.elem_count() == blocks.div_ceil(*group)
            }
        };
        if block < 2 || !block.is_multiple_of(2) || packed.elem_count() != n.div_ceil(2) || !scales_fit {
            candle_core::bail!("4-bit blocks: parts that are not of a matrix {rows} x {cols}, block {block}");
        }
        Ok(Self { rows, cols, block, packed, scales, book, source, compute })
    }

    /// [rows, cols].
    pub fn dims(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Values a block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// The dtype that decoded values are rounded to first: that of the tensor that was quantized.
    pub fn source_dtype(&self) -> DType {
        self.source
    }

    /// The dtype of decoded values.
    pub fn dtype(&self) -> DType {
        self.compute
    }

    /// Packed codes, and scales.
    pub fn parts(&self) -> (&Tensor, &Scales) {
        (&self.packed, &self.scales)
    }

    /// Bytes of codes and scales, the maps apart: those are shared by all matrices of a model.
    pub fn bytes(&self) -> usize {
        let size = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        size(&self.packed)
            + match &self.scales {
                Scales::Plain(s) => size(s),
                Scales::Nested { codes, absmax, .. } => size(codes) + size(absmax),
            }
    }

    /// `x W^T`: [t, cols] -> [t, rows], in `x`'s dtype.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if is_cpu(x) {
            return on_real!(x.dtype(), forward_cpu(self, x));
        }
        x.matmul(&self.decode()?.to_dtype(x.dtype())?.t()?)
    }

    /// `dy W`, added to `dx` if given: [t, rows] -> [t, cols], in `dy`'s dtype.
    pub fn backward(&self, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
        if is_cpu(dy) {
            return on_real!(dy.dtype(), backward_cpu(self, dy, dx));
        }
        let add = dy.matmul(&self.decode()?.to_dtype(dy.dtype())?)?;
        match dx {
            None => Ok(add),
            Some(dx) => dx + add,
        }
    }

    /// `W A^T`: [r, cols] -> [rows, r], in `a`'s dtype.
    pub fn times(&self, a: &Tensor) -> Result<Tensor> {
        self.forward(a)?.t()?.contiguous()
    }

    /// Squared norm of each row `[rows]`, in f32 (f64 where that is the compute dtype).
    pub fn row_squares(&self) -> Result<Tensor> {
        if self.packed.device().is_cpu() {
            return on_real!(self.compute, row_squares_cpu(self));
        }
        self.decode()?.to_dtype(DType::F32)?.sqr()?.sum(1)
    }

    /// The decoded matrix [rows, cols] in the compute dtype.
    pub fn decode(&self) -> Result<Tensor> {
        self.decode_rows(0..self.rows)
    }

    /// Some decoded rows, in the compute dtype.
    pub fn decode_rows(&self, rows: Range<usize>) -> Result<Tensor> {
        if rows.start > rows.end || rows.end > self.rows {
            candle_core::bail!("4-bit blocks: rows {rows:?} of {}", self.rows);
        }
        if self.packed.device().is_cpu() {
            return on_real!(self.compute, decode_cpu(self, rows));
        }
        self.decode_composed(rows)
    }

    /// The scale of each block [blocks], f32, by candle's operations.
    fn scales_composed(&self) -> Result<Tensor> {
        match &self.scales {
            Scales::Plain(s) => Ok(s.clone()),
            Scales::Nested { codes, map, absmax, group, offset } => {
                let unit = look_up(map, codes)?;
                by_group(&unit, absmax, *group)?.affine(1.0, f64::from(*offset))
            }
        }
    }

    fn decode_composed(&self, rows: Range<usize>) -> Result<Tensor> {
        let scales = self.scales_composed()?;
        let (start, end) = (rows.start * self.cols, rows.end * self.cols);
        let step = (CHUNK / self.block).max(1);
        let mut parts = Vec::new();
        let mut b = start / self.block;
        while b * self.block < end {
            // whole blocks, the last of the matrix perhaps a short one
            let stop = (b + step).min(end.div_ceil(self.block));
            let (from, to) = (b * self.block, (stop * self.block).min(self.rows * self.cols));
            let bytes = self.packed.narrow(0, from / 2, to.div_ceil(2) - from / 2)?;
            let unit = look_up(&self.book.pairs, &bytes)?.flatten_all()?.narrow(0, 0, to - from)?;
            let values = by_group(&unit, &scales.narrow(0, b, stop - b)?, self.block)?;
            let values = values.to_dtype(self.source)?.to_dtype(self.compute)?;
            let (skip, last) = (start.max(from), end.min(to));
            parts.push(values.narrow(0, skip - from, last - skip)?);
            b = stop;
        }
        let flat = match parts.as_slice() {
            [one] => one.contiguous()?,
            many => Tensor::cat(many, 0)?,
        };
        flat.reshape((rows.len(), self.cols))
    }
}

/// `table[codes]`. Not with the codes as they are: candle takes the largest index of a type for "none".
fn look_up(table: &Tensor, codes: &Tensor) -> Result<Tensor> {
    table.index_select(&codes.to_dtype(DType::U32)?, 0)
}

/// `values[n] * factors[n / size]`, the last group perhaps a short one.
fn by_group(values: &Tensor, factors: &Tensor, size: usize) -> Result<Tensor> {
    let n = values.elem_count();
    let whole = n / size;
    let mut parts = Vec::new();
    if whole > 0 {
        let v = values.narrow(0, 0, whole * size)?.reshape((whole, size))?;
        let f = factors.narrow(0, 0, whole)?.unsqueeze(1)?;
        parts.push(v.broadcast_mul(&f)?.flatten_all()?);
    }
    if n > whole * size {
        let v = values.narrow(0, whole * size, n - whole * size)?;
        parts.push(v.broadcast_mul(&factors.narrow(0, whole, 1)?)?);
    }
    Tensor::cat(&parts, 0)
}

/// The bytes of a contiguous u8 tensor on the CPU.
struct Bytes<'a>(StorageRef<'a>, Range<usize>);

impl<'a> Bytes<'a> {
    fn of(t: &'a Tensor) -> Result<Self> {
        let (s, l) = t.storage_and_layout();
        let Some((start, end)) = l.contiguous_offsets() else {
            candle_core::bail!("4-bit blocks: codes that are not contiguous");
        };
        match &*s {
            Storage::Cpu(c) => {
                c.as_slice::<u8>()?;
            }
            _ => candle_core::bail!("4-bit blocks: codes that are not on the CPU"),
        }
        Ok(Self(s, start..end))
    }
}

impl Deref for Bytes<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &*self.0 {
            Storage::Cpu(s) => s.as_slice::<u8>().map(|s| &s[self.1.clone()]).unwrap_or(&[]),
            _ => &[],
        }
    }
}

/// Scales as slices.
enum HostScales<'a> {
    Plain(View<'a, f32>),
    Nested { codes: Bytes<'a>, map: View<'a, f32>, absmax: View<'a, f32>, group: usize, offset: f32 },
}

/// A matrix's parts as slices.
struct Host<'a> {
    packed: Bytes<'a>,
    scales: HostScales<'a>,
    w: &'a Blocks,
}

impl<'a> Host<'a> {
    fn of(w: &'a Blocks) -> Result<Self> {
        let scales = match &w.scales {
            Scales::Plain(s) => HostScales::Plain(view(s)?),
            Scales::Nested { codes, map, absmax, group, offset } => HostScales::Nested {
                codes: Bytes::of(codes)?,
                map: view(map)?,
                absmax: view(absmax)?,
                group: *group,
                offset: *offset,
            },
        };
        Ok(Self { packed: Bytes::of(&w.packed)?, scales, w })
    }

    fn slices(&self) -> Slices<'_> {
        Slices {
            packed: &self.packed,
            scales: match &self.scales {
                HostScales::Plain(s) => ScaleSlices::Plain(s),
                HostScales::Nested { codes, map, absmax, group, offset } => {
                    ScaleSlices::Nested { codes, map, absmax, group: *group, offset: *offset }
                }
            },
            code: &self.w.book.code,
            block: self.w.block,
            round: [self.w.source, self.w.compute],
        }
    }
}

#[derive(Clone, Copy)]
enum ScaleSlices<'a> {
    Plain(&'a [f32]),
    Nested { codes: &'a [u8], map: &'a [f32], absmax: &'a [f32], group: usize, offset: f32 },
}

/// What threads decode from.
#[derive(Clone, Copy)]
struct Slices<'a> {
    packed: &'a [u8],
    scales: ScaleSlices<'a>,
    code: &'a [f32; 16],
    block: usize,
    round: [DType; 2],
}

impl Slices<'_> {
    #[inline]
    fn scale(&self, b: usize) -> f32 {
        match self.scales {
            ScaleSlices::Plain(s) => s[b],
            ScaleSlices::Nested { codes, map, absmax, group, offset } => {
                map[codes[b] as usize] * absmax[b / group] + offset
            }
        }
    }

    /// The 16 values that the codes of a block stand for.
    #[inline]
    fn values<T: Real>(&self, b: usize) -> [T; 16] {
        let s = self.scale(b);
        let mut v = self.code.map(|c| c * s);
        for dtype in self.round {
            match dtype {
                DType::BF16 => v = v.map(|x| half::bf16::from_f32(x).to_f32()),
                DType::F16 => v = v.map(|x| half::f16::from_f32(x).to_f32()),
                _ => {}
            }
        }
        v.map(|x| T::of(f64::from(x)))
    }

    /// Decodes `out.len()` values from value `at` on.
    fn decode<T: Real>(&self, mut at: usize, mut out: &mut [T]) {
        while !out.is_empty() {
            let b = at / self.block;
            let n = ((b + 1) * self.block - at).min(out.len());
            let (now, rest) = out.split_at_mut(n);
            unpack(&self.packed[at / 2..(at + n).div_ceil(2)], at % 2 == 1, &self.values(b), now);
            (at, out) = (at + n, rest);
        }
    }
}

/// Looks codes up; with `odd` the first one is in the lower half of its byte.
#[inline]
fn unpack<T: Real>(packed: &[u8], odd: bool, values: &[T; 16], out: &mut [T]) {
    let (packed, out) = match (odd, packed, out) {
        (true, [first, packed @ ..], [o, out @ ..]) => {
            *o = values[(first & 15) as usize];
            (packed, out)
        }
        (_, packed, out) => (packed, out),
    };
    let mut pairs = out.chunks_exact_mut(2);
    for (o, p) in pairs.by_ref().zip(packed) {
        o[0] = values[(p >> 4) as usize];
        o[1] = values[(p & 15) as usize];
    }
    if let ([o], Some(p)) = (pairs.into_remainder(), packed.last()) {
        *o = values[(p >> 4) as usize];
    }
}

/// Columns of a product that one panel makes, for an inner dimension `k`: fixed by the shapes, so that
/// results do not depend on the number of threads.
fn width(k: usize) -> usize {
    (PANEL / k.max(1) / NARROWEST * NARROWEST).clamp(NARROWEST, 4 * NARROWEST)
}

fn forward_cpu<T: Real>(w: &Blocks, x: &Tensor) -> Result<Tensor> {
    let (t, k) = x.dims2()?;
    if k != w.cols {
        candle_core::bail!("4-bit blocks: {:?} x [{}, {}]^T", x.shape(), w.rows, w.cols);
    }
    let xv = view::<T>(x)?;
    let host = Host::of(w)?;
    let s = host.slices();
    let mut out = vec![T::zero(); t * w.rows];
    let a = Mat::new(&xv, t, k, k);
    gemm::by_panels(&mut out, w.rows, false, a, width(k), true, &|columns: Range<usize>, panel: &mut [T]| {
        s.decode(columns.start * k, panel);
    });
    tensor(out, (t, w.rows), x.dtype())
}

fn backward_cpu<T: Real>(w: &Blocks, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
    let (t, k) = dy.dims2()?;
    if k != w.rows || dx.as_ref().is_some_and(|dx| dx.dims() != [t, w.cols]) {
        candle_core::bail!("4-bit blocks: {:?} x [{}, {}]", dy.shape(), w.rows, w.cols);
    }
    let dyv = view::<T>(dy)?;
    let host = Host::of(w)?;
    let s = host.slices();
    let a = Mat::new(&dyv, t, k, k);
    let product = |dst: &mut [T], add| {
        gemm::by_panels(dst, w.cols, add, a, width(k), false, &|columns: Range<usize>, panel: &mut [T]| {
            for (r, row) in panel.chunks_mut(columns.len()).enumerate() {
                s.decode(r * w.cols + columns.start, row);
            }
        });
    };
    match dx {
        Some(dx) if dx.dtype() == T::DTYPE => {
            in_place::<T>("4-bit backward", &dx, |dst| {
                product(dst, true);
                Ok(())
            })?;
            Ok(dx)
        }
        dx => {
            let mut out = vec![T::zero(); t * w.cols];
            product(&mut out, false);
            let own = tensor(out, (t, w.cols), dy.dtype())?;
            match dx {
                None => Ok(own),
                Some(dx) => dx + own,
            }
        }
    }
}

fn row_squares_cpu<T: Real>(w: &Blocks) -> Result<Tensor> {
    let host = Host::of(w)?;
    let s = host.slices();
    let mut out = vec![T::zero(); w.rows];
    out.par_iter_mut().enumerate().for_each_init(
        || vec![T::zero(); w.cols],
        |row, (r, o)| {
            s.decode(r * w.cols, row);
            *o = dot(row, row);
        },
    );
    tensor(out, w.rows, T::DTYPE)
}

fn decode_cpu<T: Real>(w: &Blocks, rows: Range<usize>) -> Result<Tensor> {
    let host = Host::of(w)?;
    let s = host.slices();
    let mut out = vec![T::zero(); rows.len() * w.cols];
    out.par_chunks_mut(w.cols.max(1)).enumerate().for_each(|(r, row)| {
        s.decode((rows.start + r) * w.cols, row);
    });
    tensor(out, (rows.len(), w.cols), w.compute)
}

#[cfg(test)]
#[path = "blocks_tests.rs"]
mod tests;
