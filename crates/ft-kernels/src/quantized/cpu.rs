//! Dequantization and products on the CPU.
//!
//! A product dequantizes and multiplies one cache-sized (L2) tile of the matrix after another: tiles of
//! rows of W in forward, tiles of columns in backward. Each tile spans the full inner dimension, so
//! nothing is summed across tiles.

use super::matrix::{QuantizedMatrix, Scales};
use super::tiles::FEW;
use crate::Tensor;
use crate::cpu::{self, Bytes, Float, ROWS, View, dot, ghost_products, onto, tensor, view};
use crate::gemm::{self, Mat, pairs};
use crate::tensor::Ghost;
use candle_core::{DType, Result};
use half::bf16;
use std::ops::Range;

/// Values per tile: 512 KiB of f32, to fit a core's L2 cache along with the other operand.
const TILE: usize = 1 << 17;
/// Minimum result columns per tile; multiples of 64 keep the tiles of backward on block boundaries.
const NARROWEST: usize = 64;

/// A matrix as CPU views.
struct Host<'a> {
    packed: Bytes<'a>,
    scales: Scales<Bytes<'a>, View<'a, f32>>,
    w: &'a QuantizedMatrix,
}

impl<'a> Host<'a> {
    fn of(w: &'a QuantizedMatrix) -> Result<Self> {
        let scales = match &w.scales {
            Scales::Plain(s) => Scales::Plain(view(s)?),
            Scales::Nested { codes, map, absmax, group, offset } => Scales::Nested {
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
                Scales::Plain(s) => Scales::Plain(&s[..]),
                Scales::Nested { codes, map, absmax, group, offset } => Scales::Nested {
                    codes: &codes[..],
                    map: &map[..],
                    absmax: &absmax[..],
                    group: *group,
                    offset: *offset,
                },
            },
            code: &self.w.book.code,
            block: self.w.block,
            round: [self.w.source, self.w.compute],
        }
    }
}

/// Borrowed slices for worker threads.
#[derive(Clone, Copy)]
struct Slices<'a> {
    packed: &'a [u8],
    scales: Scales<&'a [u8], &'a [f32]>,
    code: &'a [f32; 16],
    block: usize,
    round: [DType; 2],
}

impl Slices<'_> {
    #[inline]
    fn scale(&self, b: usize) -> f32 {
        match self.scales {
            Scales::Plain(s) => s[b],
            Scales::Nested { codes, map, absmax, group, offset } => {
                map[codes[b] as usize] * absmax[b / group] + offset
            }
        }
    }

    /// The 16 dequantized code values of a block.
    #[inline]
    fn values<T: Float>(&self, b: usize) -> [T; 16] {
        let s = self.scale(b);
        let mut v = self.code.map(|c| c * s);
        for dtype in self.round {
            match dtype {
                DType::BF16 => v = v.map(|x| half::bf16::from_f32(x).to_f32()),
                DType::F16 => v = v.map(|x| half::f16::from_f32(x).to_f32()),
                _ => {}
            }
        }
        v.map(T::widened)
    }

    /// Dequantizes `out.len()` values, starting at `at`.
    fn dequantize<T: Float>(&self, mut at: usize, mut out: &mut [T]) {
        while !out.is_empty() {
            let b = at / self.block;
            let n = ((b + 1) * self.block - at).min(out.len());
            let (now, rest) = out.split_at_mut(n);
            unpack(&self.packed[at / 2..(at + n).div_ceil(2)], at % 2 == 1, &self.values(b), now);
            (at, out) = (at + n, rest);
        }
    }

    /// Dequantizes a tile of a matrix with `cols` columns to bf16. The source dtype is bf16, so the
    /// conversion is exact.
    fn tile(&self, cols: usize, rows: Range<usize>, columns: Range<usize>, tile: &mut [bf16]) {
        let mut wide = vec![0f32; columns.len()];
        for (r, tile) in rows.zip(tile.chunks_mut(columns.len().max(1))) {
            self.dequantize(r * cols + columns.start, &mut wide);
            tile.iter_mut().zip(&wide).for_each(|(t, x)| *t = cpu::narrow(*x));
        }
    }
}

/// Looks up codes. With `odd`, the first code is in the low half of its byte.
#[inline]
fn unpack<T: Float>(packed: &[u8], odd: bool, values: &[T; 16], out: &mut [T]) {
    let (packed, out) = match (odd, packed, out) {
        (true, [first, packed @ ..], [o, out @ ..]) => {
            *o = values[(first & 15) as usize];
            (packed, out)
        }
        (_, packed, out) => (packed, out),
    };
    let done = T::look_up(packed, values, out);
    let (packed, out) = (&packed[done / 2..], &mut out[done..]);
    let mut pairs = out.chunks_exact_mut(2);
    for (o, p) in pairs.by_ref().zip(packed) {
        o[0] = values[(p >> 4) as usize];
        o[1] = values[(p & 15) as usize];
    }
    if let ([o], Some(p)) = (pairs.into_remainder(), packed.last()) {
        *o = values[(p >> 4) as usize];
    }
}

/// Result columns per tile for an inner dimension of `k`. Depends only on shapes, so results do not
/// depend on the number of threads.
pub fn tile_width(k: usize) -> usize {
    (TILE / k.max(1) / NARROWEST * NARROWEST).clamp(NARROWEST, 4 * NARROWEST)
}

/// `x W^T` [t, rows] for a few tokens `x` [t, cols], for decoding: processes one row of W at a time
/// within the L1 cache, without packing. `row` dequantizes a row.
pub fn few_tokens<T: Float>(
    x: &[T],
    t: usize,
    (rows, cols): (usize, usize),
    row: impl Fn(usize, &mut [T]) + Sync,
) -> Vec<T> {
    let mut y_rt = vec![T::zero(); rows * t];
    let t1 = t.max(1);
    let room = || vec![T::zero(); cols];
    cpu::each_with(y_rt.chunks_mut(ROWS * t1).enumerate(), room, |buffer, (part, y)| {
        for (r, y) in y.chunks_mut(t1).enumerate() {
            row(part * ROWS + r, buffer);
            y.iter_mut().zip(x.chunks(cols.max(1))).for_each(|(y, x)| *y = dot(x, buffer));
        }
    });
    if t <= 1 {
        return y_rt;
    }
    (0..t * rows).map(|i| y_rt[i % rows * t + i / rows]).collect()
}

/// See [`QuantizedMatrix::forward`].
pub fn forward_cpu<T: Float>(w: &QuantizedMatrix, x: &Tensor) -> Result<Tensor> {
    let (t, k) = x.dims2()?;
    if k != w.cols {
        candle_core::bail!("4-bit blocks: {:?} x [{}, {}]^T", x.shape(), w.rows, w.cols);
    }
    if t > FEW && w.compute == x.dtype() && pairs::takes(&[x])? {
        let host = x.real().ok().map(|_| Host::of(w)).transpose()?;
        let s = host.as_ref().map(Host::slices);
        let make = |columns: Range<usize>, inner: Range<usize>, tile: &mut [bf16]| {
            s.iter().for_each(|s| s.tile(w.cols, columns.clone(), inner.clone(), tile));
        };
        return pairs::made(x, w.rows, true, &make, None);
    }
    let tiles = gemm::ghost_tiles((t, k, w.rows), tile_width(k), true, true);
    if let Some([y]) = ghost_products::<T, 1>(&[x], [((t, w.rows).into(), x.dtype())], tiles) {
        return Ok(y);
    }
    let xv = view::<T>(x)?;
    let host = Host::of(w)?;
    let s = host.slices();
    if t <= FEW {
        let out = few_tokens(&xv, t, (w.rows, k), |r, row| s.dequantize(r * k, row));
        return tensor(out, (t, w.rows), x.dtype());
    }
    let mut out = vec![T::zero(); t * w.rows];
    let a = Mat::new(&xv, t, k, k);
    let make = |columns: Range<usize>, tile: &mut [T]| s.dequantize(columns.start * k, tile);
    gemm::by_tiles(&mut out, w.rows, false, a, tile_width(k), true, &make);
    tensor(out, (t, w.rows), x.dtype())
}

/// See [`QuantizedMatrix::backward`].
pub fn backward_cpu<T: Float>(w: &QuantizedMatrix, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
    let (t, k) = dy.dims2()?;
    if k != w.rows || dx.as_ref().is_some_and(|dx| dx.dims() != [t, w.cols]) {
        candle_core::bail!("4-bit blocks: {:?} x [{}, {}]", dy.shape(), w.rows, w.cols);
    }
    if w.compute == dy.dtype() && pairs::takes(&[dy])? {
        let host = dy.real().ok().map(|_| Host::of(w)).transpose()?;
        let s = host.as_ref().map(Host::slices);
        let make = |columns: Range<usize>, inner: Range<usize>, tile: &mut [bf16]| {
            s.iter().for_each(|s| s.tile(w.cols, inner.clone(), columns.clone(), tile));
        };
        return pairs::made(dy, w.cols, false, &make, dx);
    }
    let tiles = gemm::ghost_tiles((t, k, w.cols), tile_width(k), true, false);
    if dy.ghost().is_some() {
        return onto::<T>("4-bit backward", dy, dx, (t, w.cols), |_, _| (), tiles);
    }
    let dyv = view::<T>(dy)?;
    let host = Host::of(w)?;
    let s = host.slices();
    let a = Mat::new(&dyv, t, k, k);
    let make = |columns: Range<usize>, tile: &mut [T]| {
        for (r, row) in tile.chunks_mut(columns.len()).enumerate() {
            s.dequantize(r * w.cols + columns.start, row);
        }
    };
    let product = |dst: &mut [T], add| gemm::by_tiles(dst, w.cols, add, a, tile_width(k), false, &make);
    onto("4-bit backward", dy, dx, (t, w.cols), product, tiles)
}

/// See [`QuantizedMatrix::row_squares`].
pub fn row_squares_cpu<T: Float>(w: &QuantizedMatrix) -> Result<Tensor> {
    let host = Host::of(w)?;
    let s = host.slices();
    let mut out = vec![T::zero(); w.rows];
    let room = || vec![T::zero(); w.cols];
    cpu::each_with(out.chunks_mut(ROWS).enumerate(), room, |row, (part, out)| {
        for (r, o) in out.iter_mut().enumerate() {
            s.dequantize((part * ROWS + r) * w.cols, row);
            *o = dot(row, row);
        }
    });
    tensor(out, w.rows, T::DTYPE)
}

/// See [`QuantizedMatrix::dequantize_rows`].
pub fn dequantize_cpu<T: Float>(w: &QuantizedMatrix, rows: Range<usize>) -> Result<Tensor> {
    if let Some(g) = w.packed.ghost() {
        let wide = Ghost::new(g.ledger(), (rows.len(), w.cols), T::DTYPE);
        return Tensor::from(wide).to_dtype(w.compute);
    }
    let host = Host::of(w)?;
    let s = host.slices();
    let mut out = vec![T::zero(); rows.len() * w.cols];
    cpu::each(out.chunks_mut(ROWS * w.cols.max(1)).enumerate(), |(part, out)| {
        for (r, row) in out.chunks_mut(w.cols).enumerate() {
            s.dequantize((rows.start + part * ROWS + r) * w.cols, row);
        }
    });
    tensor(out, (rows.len(), w.cols), w.compute)
}
