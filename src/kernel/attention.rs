//! Causal attention over documents laid end to end, with grouped queries and sliding windows.
//!
//! Rows of a micro-batch are not padded: all documents stand one after the other in one sequence, and token
//! `i` sees the keys from the start of its own document to itself. So packed and padded batches are one
//! case, and nothing is computed for padding.
//!
//! The forward pass keeps, beside the output, the logarithm of each row's softmax sum; the backward pass
//! computes the probabilities again from it, block by block, so that memory grows with tokens and not with
//! their square (Dao et al., "FlashAttention", 2022).
//!
//! Axes: `t` tokens, `h` query heads, `g` key/value heads, `c` channels of a head.

use super::cpu::{self, Real, dot, is_cpu, on_real, tensor, view};
use super::gemm::{Mat, gemm};
use crate::kernel::wide;
use candle_core::{D, DType, Device, Result, Tensor};
use rayon::prelude::*;

/// Query rows that one block takes.
const BLOCK: usize = 64;
/// Scores that a composed block holds at the most: bounds its memory at 256 MiB in f32.
const SCORES: usize = 64 << 20;

/// Who sees whom.
#[derive(Clone, Debug)]
pub struct Sequences {
    /// Lengths of the documents, in order; their sum is the number of keys.
    pub docs: Vec<usize>,
    /// Index of the first query among the keys: 0 in training, the length of the cache when decoding.
    pub first_query: usize,
    /// First token of the document of each key.
    lo: Vec<u32>,
    /// 0, 1, 2, .. on the device (f32), as long as the longest document: masks are compared from it.
    iota: Tensor,
}

impl Sequences {
    /// Documents of these lengths; queries from `first_query` on.
    pub fn new(docs: &[usize], first_query: usize, device: &Device) -> Result<Self> {
        let mut lo = Vec::with_capacity(docs.iter().sum());
        for &n in docs {
            let start = lo.len() as u32;
            lo.extend(std::iter::repeat_n(start, n));
        }
        let longest = docs.iter().copied().max().unwrap_or(0).max(1);
        let iota = Tensor::arange(0f32, longest as f32, device)?;
        Ok(Self { docs: docs.to_vec(), first_query, lo, iota })
    }

    /// Number of keys.
    pub fn keys(&self) -> usize {
        self.lo.len()
    }

    /// First key that the query with key index `i` sees.
    fn first_key(&self, i: usize, window: Option<usize>) -> usize {
        let lo = self.lo[i] as usize;
        window.map_or(lo, |w| lo.max((i + 1).saturating_sub(w)))
    }
}

/// What the backward pass needs beside q, k and v.
#[derive(Clone, Debug)]
pub struct Saved {
    /// Output [t, h, c].
    pub o: Tensor,
    /// Logarithm of the softmax's sum, [t, h], f32 (f64 for f64).
    pub lse: Tensor,
}

/// Forward.
///
/// # Shapes
/// `q` [t, h, c]; `k`, `v` [keys, g, c] with h a multiple of g; the output is [t, h, c].
pub fn forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqs: &Sequences,
    window: Option<usize>,
    scale: f64,
) -> Result<Saved> {
    Shape::of(q, k, v, seqs)?;
    if is_cpu(q) {
        on_real!(q.dtype(), forward_cpu(q, k, v, seqs, window, scale))
    } else {
        forward_composed(q, k, v, seqs, window, scale)
    }
}

/// The gradients of q, k and v, given that of the output.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    saved: &Saved,
    d_o: &Tensor,
    seqs: &Sequences,
    window: Option<usize>,
    scale: f64,
) -> Result<(Tensor, Tensor, Tensor)> {
    Shape::of(q, k, v, seqs)?;
    if is_cpu(q) {
        on_real!(q.dtype(), backward_cpu(q, k, v, saved, d_o, seqs, window, scale))
    } else {
        backward_composed(q, k, v, saved, d_o, seqs, window, scale)
    }
}

#[derive(Clone, Copy)]
struct Shape {
    t: usize,
    h: usize,
    g: usize,
    c: usize,
}

impl Shape {
    fn of(q: &Tensor, k: &Tensor, v: &Tensor, seqs: &Sequences) -> Result<Self> {
        let (t, h, c) = q.dims3()?;
        let (keys, g, kc) = k.dims3()?;
        if kc != c
            || k.dims() != v.dims()
            || g == 0
            || h % g != 0
            || keys != seqs.keys()
            || t + seqs.first_query != keys
        {
            candle_core::bail!(
                "attention: q {:?}, k {:?}, v {:?}, {} keys, first query {}",
                q.shape(),
                k.shape(),
                v.shape(),
                seqs.keys(),
                seqs.first_query
            );
        }
        Ok(Self { t, h, g, c })
    }
}

/// One block of queries of one head: the keys that any of them sees, and which of those each sees.
struct Block {
    /// First key.
    k0: usize,
    /// Number of keys.
    n: usize,
}

impl Block {
    fn of(seqs: &Sequences, window: Option<usize>, i0: usize, rows: usize) -> Self {
        let first = seqs.first_query + i0;
        let k0 = seqs.first_key(first, window);
        Self { k0, n: first + rows - k0 }
    }

    /// Columns of the block that its row `r` sees.
    fn seen(&self, seqs: &Sequences, window: Option<usize>, i0: usize, r: usize) -> (usize, usize) {
        let i = seqs.first_query + i0 + r;
        (seqs.first_key(i, window) - self.k0, i + 1 - self.k0)
    }
}

fn forward_cpu<T: Real>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqs: &Sequences,
    window: Option<usize>,
    scale: f64,
) -> Result<Saved> {
    let Shape { t, h, g, c } = Shape::of(q, k, v, seqs)?;
    let (qv, kv, vv) = (view::<T>(q)?, view::<T>(k)?, view::<T>(v)?);
    let (qv, kv, vv) = (&*qv, &*kv, &*vv);
    let (mut o, mut lse) = (vec![T::zero(); t * h * c], vec![T::zero(); t * h]);
    o.par_chunks_mut(BLOCK * h * c).zip(lse.par_chunks_mut(BLOCK * h)).enumerate().for_each(
        |(b, (o, lse))| {
            let i0 = b * BLOCK;
            let rows = lse.len() / h;
            let block = Block::of(seqs, window, i0, rows);
            let n = block.n;
            let mut p = vec![T::zero(); rows * n];
            for head in 0..h {
                let kvh = head / (h / g);
                let qm = Mat::new(&qv[(i0 * h + head) * c..], rows, c, h * c);
                let km = Mat::new(&kv[(block.k0 * g + kvh) * c..], n, c, g * c);
                let vm = Mat::new(&vv[(block.k0 * g + kvh) * c..], n, c, g * c);
                gemm(&mut p, n, false, qm, km.t(), T::of(scale), false);
                for (r, row) in p.chunks_mut(n).enumerate() {
                    let (a, z) = block.seen(seqs, window, i0, r);
                    row[..a].fill(T::zero());
                    row[z..].fill(T::zero());
                    let seen = &mut row[a..z];
                    let max = cpu::max(seen);
                    for x in seen.iter_mut() {
                        *x = (*x - max).exp();
                    }
                    let sum = cpu::sum(seen);
                    let inverse = T::one() / sum;
                    seen.iter_mut().for_each(|x| *x *= inverse);
                    lse[r * h + head] = max + sum.ln();
                }
                let pm = Mat::new(&p, rows, n, n);
                gemm(&mut o[head * c..], h * c, false, pm, vm, T::one(), false);
            }
        },
    );
    Ok(Saved { o: tensor(o, (t, h, c), q.dtype())?, lse: tensor(lse, (t, h), T::DTYPE)? })
}

#[allow(clippy::too_many_arguments)]
fn backward_cpu<T: Real>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    saved: &Saved,
    d_o: &Tensor,
    seqs: &Sequences,
    window: Option<usize>,
    scale: f64,
) -> Result<(Tensor, Tensor, Tensor)> {
    let Shape { t, h, g, c } = Shape::of(q, k, v, seqs)?;
    let keys = seqs.keys();
    let (qv, kv, vv) = (view::<T>(q)?, view::<T>(k)?, view::<T>(v)?);
    let (ov, lv, dv) = (view::<T>(&saved.o)?, view::<T>(&saved.lse)?, view::<T>(d_o)?);
    let (qv, kv, vv, ov, lv, dv) = (&*qv, &*kv, &*vv, &*ov, &*lv, &*dv);
    let most =
        (0..t).step_by(BLOCK).map(|i0| Block::of(seqs, window, i0, BLOCK.min(t - i0)).n).max().unwrap_or(0);
    // each query head by itself; the heads of a group are summed in order below
    let heads: Vec<(Vec<T>, Vec<T>, Vec<T>)> = (0..h)
        .into_par_iter()
        .map(|head| {
            let kvh = head / (h / g);
            let mut dq = vec![T::zero(); t * c];
            let (mut dk, mut dval) = (vec![T::zero(); keys * c], vec![T::zero(); keys * c]);
            // as large as any block needs, at once: a vector that grows holds twice what it needs
            let (mut p, mut dp) =
                (vec![T::zero(); BLOCK.min(t) * most], vec![T::zero(); BLOCK.min(t) * most]);
            for i0 in (0..t).step_by(BLOCK) {
                let rows = BLOCK.min(t - i0);
                let block = Block::of(seqs, window, i0, rows);
                let (k0, n) = (block.k0, block.n);
                let (p, dp) = (&mut p[..rows * n], &mut dp[..rows * n]);
                let at = (i0 * h + head) * c;
                let qm = Mat::new(&qv[at..], rows, c, h * c);
                let gm = Mat::new(&dv[at..], rows, c, h * c);
                let km = Mat::new(&kv[(k0 * g + kvh) * c..], n, c, g * c);
                let vm = Mat::new(&vv[(k0 * g + kvh) * c..], n, c, g * c);
                gemm(p, n, false, qm, km.t(), T::of(scale), false);
                gemm(dp, n, false, gm, vm.t(), T::one(), false);
                for r in 0..rows {
                    let (a, z) = block.seen(seqs, window, i0, r);
                    let (p, dp) = (&mut p[r * n..(r + 1) * n], &mut dp[r * n..(r + 1) * n]);
                    let row = at + r * h * c;
                    let delta = dot(&dv[row..row + c], &ov[row..row + c]);
                    let lse = lv[(i0 + r) * h + head];
                    p[..a].fill(T::zero());
                    p[z..].fill(T::zero());
                    dp[..a].fill(T::zero());
                    dp[z..].fill(T::zero());
                    for (p, dp) in p[a..z].iter_mut().zip(&mut dp[a..z]) {
                        *p = (*p - lse).exp();
                        *dp = *p * (*dp - delta) * T::of(scale);
                    }
                }
                let (pm, dpm) = (Mat::new(p, rows, n, n), Mat::new(dp, rows, n, n));
                gemm(&mut dval[k0 * c..(k0 + n) * c], c, true, pm.t(), gm, T::one(), false);
                gemm(&mut dk[k0 * c..(k0 + n) * c], c, true, dpm.t(), qm, T::one(), false);
                gemm(&mut dq[i0 * c..(i0 + rows) * c], c, false, dpm, km, T::one(), false);
            }
            (dq, dk, dval)
        })
        .collect();
    let mut dq = vec![T::zero(); t * h * c];
    dq.par_chunks_mut(h * c).enumerate().for_each(|(i, row)| {
        for (head, row) in row.chunks_mut(c).enumerate() {
            row.copy_from_slice(&heads[head].0[i * c..(i + 1) * c]);
        }
    });
    let (mut dk, mut dval) = (vec![T::zero(); keys * g * c], vec![T::zero(); keys * g * c]);
    let per = h / g;
    dk.par_chunks_mut(g * c).zip(dval.par_chunks_mut(g * c)).enumerate().for_each(|(i, (dk, dval))| {
        for (head, (_, hk, hv)) in heads.iter().enumerate() {
            let (to, from) = ((head / per) * c, i * c);
            for x in 0..c {
                dk[to + x] += hk[from + x];
                dval[to + x] += hv[from + x];
            }
        }
    });
    Ok((
        tensor(dq, (t, h, c), q.dtype())?,
        tensor(dk, (keys, g, c), q.dtype())?,
        tensor(dval, (keys, g, c), q.dtype())?,
    ))
}

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
fn scores(
    q: &Tensor,
    k: &Tensor,
    part: &Part,
    seqs: &Sequences,
    window: Option<usize>,
    scale: f64,
) -> Result<Tensor> {
    let (h, g) = (q.dim(1)?, k.dim(1)?);
    let qg = by_group(&q.narrow(0, part.a, part.rows)?, g)?;
    let kg = k.narrow(0, part.k0, part.n)?.transpose(0, 1)?.contiguous()?;
    let s = (wide(&qg.matmul(&kg.transpose(1, 2)?)?)? * scale)?;
    let rows = seqs.iota.narrow(0, part.offset, part.rows)?.unsqueeze(1)?;
    let cols = seqs.iota.narrow(0, 0, part.n)?.unsqueeze(0)?;
    let mut hidden = cols.broadcast_gt(&rows)?;
    if let Some(w) = window {
        let far = cols.broadcast_le(&(&rows - w as f64)?)?;
        hidden = (hidden + far)?;
    }
    let mask = (hidden.to_dtype(s.dtype())? * -1e30)?;
    s.reshape((h, part.rows, part.n))?.broadcast_add(&mask.unsqueeze(0)?)?.reshape(s.shape())
}

fn forward_composed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqs: &Sequences,
    window: Option<usize>,
    scale: f64,
) -> Result<Saved> {
    let (h, g) = (q.dim(1)?, k.dim(1)?);
    let (mut os, mut lses) = (Vec::new(), Vec::new());
    for part in parts(seqs, h) {
        let s = scores(q, k, &part, seqs, window, scale)?;
        let max = s.max_keepdim(D::Minus1)?;
        let e = s.broadcast_sub(&max)?.exp()?;
        let sum = e.sum_keepdim(D::Minus1)?;
        let p = e.broadcast_div(&sum)?.to_dtype(v.dtype())?;
        let vg = v.narrow(0, part.k0, part.n)?.transpose(0, 1)?.contiguous()?;
        os.push(from_group(&p.matmul(&vg)?, part.rows, h)?);
        let lse = (max + sum.log()?)?;
        lses.push(lse.reshape((h, part.rows))?.t()?.contiguous()?);
    }
    debug_assert_eq!(h % g, 0);
    Ok(Saved { o: Tensor::cat(&os, 0)?, lse: Tensor::cat(&lses, 0)? })
}

#[allow(clippy::too_many_arguments)]
fn backward_composed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    saved: &Saved,
    d_o: &Tensor,
    seqs: &Sequences,
    window: Option<usize>,
    scale: f64,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (h, g, c) = (q.dim(1)?, k.dim(1)?, q.dim(2)?);
    let acc = if q.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let dk = Tensor::zeros(k.shape(), acc, k.device())?;
    let dv = Tensor::zeros(v.shape(), acc, v.device())?;
    let mut dqs = Vec::new();
    for part in parts(seqs, h) {
        let s = scores(q, k, &part, seqs, window, scale)?;
        let lse = saved.lse.narrow(0, part.a, part.rows)?.t()?.contiguous()?;
        let p = s.broadcast_sub(&lse.reshape((g, h / g * part.rows, 1))?)?.exp()?;
        drop(s);
        let go = d_o.narrow(0, part.a, part.rows)?;
        let delta = (wide(&go)? * wide(&saved.o.narrow(0, part.a, part.rows)?)?)?.sum(D::Minus1)?;
        let delta = delta.t()?.contiguous()?.reshape((g, h / g * part.rows, 1))?;
        let gg = by_group(&go, g)?;
        let vg = v.narrow(0, part.k0, part.n)?.transpose(0, 1)?.contiguous()?;
        let kg = k.narrow(0, part.k0, part.n)?.transpose(0, 1)?.contiguous()?;
        let dp = wide(&gg.matmul(&vg.transpose(1, 2)?)?)?;
        let ds = ((&p * dp.broadcast_sub(&delta)?)? * scale)?.to_dtype(q.dtype())?;
        let p = p.to_dtype(q.dtype())?;
        dqs.push(from_group(&ds.matmul(&kg)?, part.rows, h)?);
        let qg = by_group(&q.narrow(0, part.a, part.rows)?, g)?;
        for (to, left, right) in [(&dk, &ds, &qg), (&dv, &p, &gg)] {
            let add = left.transpose(1, 2)?.matmul(right)?.transpose(0, 1)?.contiguous()?;
            let view = to.narrow(0, part.k0, part.n)?;
            to.slice_set(&(view + add.to_dtype(acc)?.reshape((part.n, g, c))?)?, 0, part.k0)?;
        }
    }
    Ok((Tensor::cat(&dqs, 0)?, dk.to_dtype(q.dtype())?, dv.to_dtype(q.dtype())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::check::{close, gradient, randn};

    struct Case {
        docs: &'static [usize],
        h: usize,
        g: usize,
        c: usize,
        window: Option<usize>,
    }

    const CASES: &[Case] = &[
        Case { docs: &[5], h: 2, g: 1, c: 4, window: None },
        Case { docs: &[1], h: 1, g: 1, c: 1, window: None },
        Case { docs: &[3, 4, 1], h: 4, g: 2, c: 2, window: None },
        Case { docs: &[7, 2], h: 2, g: 2, c: 3, window: Some(3) },
        Case { docs: &[6], h: 3, g: 1, c: 2, window: Some(1) },
    ];

    fn inputs(case: &Case, dtype: DType) -> Result<(Tensor, Tensor, Tensor, Tensor, Sequences)> {
        let t = case.docs.iter().sum::<usize>();
        Ok((
            randn(1, (t, case.h, case.c), dtype)?,
            randn(2, (t, case.g, case.c), dtype)?,
            randn(3, (t, case.g, case.c), dtype)?,
            randn(4, (t, case.h, case.c), dtype)?,
            Sequences::new(case.docs, 0, &Device::Cpu)?,
        ))
    }

    #[test]
    fn gradients() -> Result<()> {
        for case in CASES {
            let (q, k, v, dy, s) = inputs(case, DType::F64)?;
            let w = case.window;
            let saved = forward(&q, &k, &v, &s, w, 0.7)?;
            let (dq, dk, dv) = backward(&q, &k, &v, &saved, &dy, &s, w, 0.7)?;
            gradient("q", &q, &dq, &dy, |q| Ok(forward(q, &k, &v, &s, w, 0.7)?.o));
            gradient("k", &k, &dk, &dy, |k| Ok(forward(&q, k, &v, &s, w, 0.7)?.o));
            gradient("v", &v, &dv, &dy, |v| Ok(forward(&q, &k, v, &s, w, 0.7)?.o));
        }
        Ok(())
    }

    #[test]
    fn composition_agrees() -> Result<()> {
        let long = Case { docs: &[70, 3, 90, 1], h: 4, g: 2, c: 8, window: Some(40) };
        for case in CASES.iter().chain([&long]) {
            let (q, k, v, dy, s) = inputs(case, DType::F32)?;
            let w = case.window;
            let (a, b) = (forward(&q, &k, &v, &s, w, 0.5)?, forward_composed(&q, &k, &v, &s, w, 0.5)?);
            close(&b.o, &a.o, 2e-6);
            close(&b.lse, &a.lse, 2e-6);
            let x = backward(&q, &k, &v, &a, &dy, &s, w, 0.5)?;
            let y = backward_composed(&q, &k, &v, &a, &dy, &s, w, 0.5)?;
            close(&y.0, &x.0, 3e-6);
            close(&y.1, &x.1, 3e-6);
            close(&y.2, &x.2, 3e-6);
        }
        Ok(())
    }

    /// Another document's tokens must not move a bit of this one's output.
    #[test]
    fn documents_do_not_see_one_another() -> Result<()> {
        let case = Case { docs: &[9, 70, 5], h: 2, g: 1, c: 4, window: None };
        let (q, k, v, _, s) = inputs(&case, DType::F32)?;
        let a = forward(&q, &k, &v, &s, None, 0.5)?.o.narrow(0, 9, 70)?.flatten_all()?.to_vec1::<f32>()?;
        let noise = randn(77, (9, 1, 4), DType::F32)?;
        let swap = |x: &Tensor| Tensor::cat(&[noise.clone(), x.narrow(0, 9, 75)?], 0);
        let b = forward(&q, &swap(&k)?, &swap(&v)?, &s, None, 0.5)?;
        assert_eq!(a, b.o.narrow(0, 9, 70)?.flatten_all()?.to_vec1::<f32>()?);
        Ok(())
    }

    /// Decoding with cached keys gives what the whole sequence gives.
    #[test]
    fn later_queries_alone() -> Result<()> {
        let case = Case { docs: &[80], h: 4, g: 2, c: 4, window: Some(30) };
        let (q, k, v, _, s) = inputs(&case, DType::F32)?;
        let whole = forward(&q, &k, &v, &s, case.window, 0.5)?.o.narrow(0, 77, 3)?;
        let tail = Sequences::new(&[80], 77, &Device::Cpu)?;
        let q3 = q.narrow(0, 77, 3)?.contiguous()?;
        close(&forward(&q3, &k, &v, &tail, case.window, 0.5)?.o, &whole, 1e-6);
        close(&forward_composed(&q3, &k, &v, &tail, case.window, 0.5)?.o, &whole, 2e-6);
        Ok(())
    }
}
