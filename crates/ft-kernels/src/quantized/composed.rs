//! Dequantization composed of candle operations, for any device: the fallback for cases without a kernel,
//! and the reference in tests.

use super::matrix::{QuantizedMatrix, Scales};
use crate::Tensor;
use candle_core::{DType, Result};
use std::ops::Range;

/// Values dequantized at a time: 64 MiB of f32 per temporary.
const CHUNK: usize = 1 << 24;

impl QuantizedMatrix {
    /// Scales of all blocks, `[blocks]` f32.
    fn scales_composed(&self) -> Result<Tensor> {
        match &self.scales {
            Scales::Plain(s) => Ok(s.clone()),
            Scales::Nested { codes, map, absmax, group, offset } => {
                let unit = look_up(map, codes)?;
                by_group(&unit, absmax, *group)?.affine(1.0, f64::from(*offset))
            }
        }
    }

    /// See [`QuantizedMatrix::dequantize_rows`].
    pub(super) fn dequantize_composed(&self, rows: Range<usize>) -> Result<Tensor> {
        let scales = self.scales_composed()?;
        let (start, end) = (rows.start * self.cols, rows.end * self.cols);
        let step = (CHUNK / self.block).max(1);
        let mut parts = Vec::new();
        let mut b = start / self.block;
        while b * self.block < end {
            // whole blocks; only the matrix's last block may be shorter
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

/// `table[codes]`. The codes are converted first: candle treats the largest index of a dtype as "none".
fn look_up(table: &Tensor, codes: &Tensor) -> Result<Tensor> {
    table.index_select(&codes.to_dtype(DType::U32)?, 0)
}

/// `values[n] * factors[n / size]`; the last group may be shorter.
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
