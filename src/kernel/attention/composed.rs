//! Attention composed of candle's operations, a document's block of queries at a time: CUDA's way.

use super::{Causal, Saved, Sequences};
use crate::kernel::Tensor;
use crate::kernel::upcast;
use candle_core::{D, DType, Result};

/// Scores that a block holds at the most: bounds its memory at 256 MiB in f32.
const SCORES: usize = 64 << 20;

/// One block of one document in the composed version: queries [a, b) of the whole, keys [k0, k0 + n).
struct Part {
    a: usize,
    rows: usize,
    k0: usize,
    n: usize,
    /// Index of the first query within its document.
    offset: usize,
}

fn parts(seqs: &Sequences, h: usize) -> Vec<Part> {
    let mut out = Vec::new();
    if seqs.docs.is_empty() {
        // a plan's: documents like the longest, of which the last block is the largest
        let (n, all) = (seqs.sizes.longest, seqs.sizes.keys);
        let rows = (SCORES / (h * n).max(1)).clamp(1, n.max(1));
        let rest = all.saturating_sub(rows);
        out.push(Part { a: 0, rows: rest, k0: 0, n, offset: 0 });
        out.push(Part { a: 0, rows: rows.min(all), k0: 0, n: n.min(all), offset: 0 });
    }
    let mut start = 0;
    for &len in &seqs.docs {
        let end = start + len;
        let mut i = start.max(seqs.first_query);
        while i < end {
            let rows = (SCORES / (h * (end - start)).max(1)).clamp(1, end - i);
            let offset = i - start;
            out.push(Part { a: i - seqs.first_query, rows, k0: start, n: offset + rows, offset });
            i += rows;
        }
        start = end;
    }
    out
}

/// [rows, h, c] -> [g, (h / g) * rows, c]: the heads that share keys side by side.
fn by_group(x: &Tensor, g: usize) -> Result<Tensor> {
    let (rows, h, c) = x.dims3()?;
    x.transpose(0, 1)?.contiguous()?.reshape((g, h / g * rows, c))
}

/// The inverse of [`by_group`].
fn from_group(x: &Tensor, rows: usize, h: usize) -> Result<Tensor> {
    let c = x.dim(2)?;
    x.reshape((h, rows, c))?.transpose(0, 1)?.contiguous()
}

/// Scores of one part with what may not be seen at a large negative number: [g, (h / g) * rows, n], f32.
fn scores(q: &Tensor, k: &Tensor, part: &Part, how: &Causal<'_>) -> Result<Tensor> {
    let (h, g) = (q.dim(1)?, k.dim(1)?);
    let qg = by_group(&q.narrow(0, part.a, part.rows)?, g)?;
    let kg = k.narrow(0, part.k0, part.n)?.transpose(0, 1)?.contiguous()?;
    let s = (upcast(&qg.matmul(&kg.transpose(1, 2)?)?)? * how.scale)?;
    let rows = how.seqs.iota.narrow(0, part.offset, part.rows)?.unsqueeze(1)?;
    let cols = how.seqs.iota.narrow(0, 0, part.n)?.unsqueeze(0)?;
    let mut hidden = cols.broadcast_gt(&rows)?;
    if let Some(w) = how.window {
        let far = cols.broadcast_le(&(&rows - w as f64)?)?;
        hidden = (hidden + far)?;
    }
    let mask = (hidden.to_dtype(s.dtype())? * -1e30)?;
    s.reshape((h, part.rows, part.n))?.broadcast_add(&mask.unsqueeze(0)?)?.reshape(s.shape())
}

/// Forward.
pub fn forward(q: &Tensor, k: &Tensor, v: &Tensor, how: &Causal<'_>) -> Result<Saved> {
    let (t, h, g) = (q.dim(0)?, q.dim(1)?, k.dim(1)?);
    let (mut os, mut lses) = (Vec::new(), Vec::new());
    let parts = parts(how.seqs, h);
    q.each(
        parts.iter(),
        |p| p.rows,
        |part| {
            let s = scores(q, k, part, how)?;
            let max = s.max_keepdim(D::Minus1)?;
            let e = s.broadcast_sub(&max)?.exp()?;
            let sum = e.sum_keepdim(D::Minus1)?;
            let p = e.broadcast_div(&sum)?.to_dtype(v.dtype())?;
            let vg = v.narrow(0, part.k0, part.n)?.transpose(0, 1)?.contiguous()?;
            os.push(from_group(&p.matmul(&vg)?, part.rows, h)?);
            let lse = (max + sum.log()?)?;
            lses.push(lse.reshape((h, part.rows))?.t()?.contiguous()?);
            Ok(())
        },
    )?;
    debug_assert_eq!(h % g, 0);
    Ok(Saved { o: Tensor::end_to_end(&os, t)?, lse: Tensor::end_to_end(&lses, t)? })
}

/// Backward.
pub fn backward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    saved: &Saved,
    d_o: &Tensor,
    how: &Causal<'_>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (t, h, g, c) = (q.dim(0)?, q.dim(1)?, k.dim(1)?, q.dim(2)?);
    let acc = if q.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let dk = Tensor::zeros(k.shape(), acc, k.device())?;
    let dv = Tensor::zeros(v.shape(), acc, v.device())?;
    let mut dqs = Vec::new();
    let parts = parts(how.seqs, h);
    q.each(
        parts.iter(),
        |p| p.rows,
        |part| {
            let s = scores(q, k, part, how)?;
            let lse = saved.lse.narrow(0, part.a, part.rows)?.t()?.contiguous()?;
            let p = s.broadcast_sub(&lse.reshape((g, h / g * part.rows, 1))?)?.exp()?;
            drop(s);
            let go = d_o.narrow(0, part.a, part.rows)?;
            let delta = (upcast(&go)? * upcast(&saved.o.narrow(0, part.a, part.rows)?)?)?.sum(D::Minus1)?;
            let delta = delta.t()?.contiguous()?.reshape((g, h / g * part.rows, 1))?;
            let gg = by_group(&go, g)?;
            let vg = v.narrow(0, part.k0, part.n)?.transpose(0, 1)?.contiguous()?;
            let kg = k.narrow(0, part.k0, part.n)?.transpose(0, 1)?.contiguous()?;
            let dp = upcast(&gg.matmul(&vg.transpose(1, 2)?)?)?;
            let ds = ((&p * dp.broadcast_sub(&delta)?)? * how.scale)?.to_dtype(q.dtype())?;
            let p = p.to_dtype(q.dtype())?;
            dqs.push(from_group(&ds.matmul(&kg)?, part.rows, h)?);
            let qg = by_group(&q.narrow(0, part.a, part.rows)?, g)?;
            for (to, left, right) in [(&dk, &ds, &qg), (&dv, &p, &gg)] {
                let add = left.transpose(1, 2)?.matmul(right)?.transpose(0, 1)?.contiguous()?;
                let view = to.narrow(0, part.k0, part.n)?;
                to.slice_set(&(view + add.to_dtype(acc)?.reshape((part.n, g, c))?)?, 0, part.k0)?;
            }
            Ok(())
        },
    )?;
    Ok((Tensor::end_to_end(&dqs, t)?, dk.to_dtype(q.dtype())?, dv.to_dtype(q.dtype())?))
}
