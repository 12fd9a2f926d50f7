//! CPU attention: blocks of queries against all keys visible to the block.

use super::cache::{BLOCK as TOKENS, Cache};
use super::{Causal, Saved, Shape};
use crate::Tensor;
use crate::cast;
use crate::cpu::{Halves, Real, View, dot, ghost_products, max, sum, tensor, vectorised, view};
use crate::gemm::{Mat, gemm};
use crate::ledger::Ledger;
use crate::padded::Padded;
use candle_core::{DType, Result};
use rayon::prelude::*;
use std::ops::Range;

/// Queries per block.
pub const BLOCK: usize = 64;

/// Keys visible to one block of queries of one head.
pub(super) struct Block {
    pub k0: usize,
    pub n: usize,
}

impl Block {
    pub fn of(how: &Causal<'_>, i0: usize, rows: usize) -> Self {
        let first = how.seqs.first_query + i0;
        let k0 = how.first_key(first);
        Self { k0, n: first + rows - k0 }
    }

    /// Range of visible keys of row `r`, relative to `k0`.
    pub fn seen(&self, how: &Causal<'_>, i0: usize, r: usize) -> (usize, usize) {
        let i = how.seqs.first_query + i0 + r;
        (how.first_key(i) - self.k0, i + 1 - self.k0)
    }
}

/// Forward pass. Each task handles [`BLOCK`] queries, one head after another.
pub fn forward<T: Real>(q: &Tensor, k: &Tensor, v: &Tensor, how: &Causal<'_>) -> Result<Saved> {
    let Shape { t, h, g, c } = Shape::of(q, k, v, how.seqs)?;
    let size = T::DTYPE.size_in_bytes();
    // each thread holds the probabilities of one block and head
    let blocks = |l: &Ledger| {
        let running = t.div_ceil(BLOCK).min(l.machine().threads as usize);
        l.touch((size * running * BLOCK.min(t) * how.most_keys()) as u64);
    };
    let out = [((t, h * c).into(), q.dtype()), ((t, h).into(), T::DTYPE)];
    if let Some([o, lse]) = ghost_products::<T, 2>(&[q, k, v], out, blocks) {
        return Ok(Saved { o: Padded::of(&o)?, lse });
    }
    let (qv, kv, vv) = (view::<T>(q)?, view::<T>(k)?, view::<T>(v)?);
    let (qv, kv, vv) = (&*qv, &*kv, &*vv);
    let (mut o, mut lse) = (vec![T::zero(); t * h * c], vec![T::zero(); t * h]);
    o.par_chunks_mut(BLOCK * h * c).zip(lse.par_chunks_mut(BLOCK * h)).enumerate().for_each(
        |(b, (o, lse))| {
            let i0 = b * BLOCK;
            let rows = lse.len() / h;
            let block = Block::of(how, i0, rows);
            let Block { k0, n } = block;
            let mut p = vec![T::zero(); rows * n];
            for head in 0..h {
                let at = (k0 * g + head / (h / g)) * c;
                let qm = Mat::new(&qv[(i0 * h + head) * c..], rows, c, h * c);
                let [km, vm] = [kv, vv].map(|x| Mat::new(&x[at..], n, c, g * c));
                gemm(&mut p, n, false, qm, km.t(), T::of(how.scale), false);
                for (r, row) in p.chunks_mut(n).enumerate() {
                    let (a, z) = block.seen(how, i0, r);
                    row[..a].fill(T::zero());
                    row[z..].fill(T::zero());
                    lse[r * h + head] = vectorised(|| softmax(&mut row[a..z]));
                }
                gemm(&mut o[head * c..], h * c, false, Mat::new(&p, rows, n, n), vm, T::one(), false);
            }
        },
    );
    let o = tensor(o, (t, h * c), q.dtype())?;
    Ok(Saved { o: Padded::of(&o)?, lse: tensor(lse, (t, h), T::DTYPE)? })
}

/// Keys or values of one cache block, [tokens, g, c].
enum Stretch<'a, T> {
    /// In the compute dtype.
    Wide(View<'a, T>),
    /// In bf16, widened on access.
    Half(Halves<'a>),
}

impl<'a, T: Real> Stretch<'a, T> {
    fn of(t: &'a Tensor) -> Result<Self> {
        Ok(if t.dtype() == DType::BF16 { Self::Half(Halves::of(t)?) } else { Self::Wide(view(t)?) })
    }

    /// The keys or values of head `kvh` for the tokens `own`, [tokens, c]. `room` receives widened
    /// values.
    fn head<'r>(
        &'r self,
        own: Range<usize>,
        kvh: usize,
        (g, c): (usize, usize),
        room: &'r mut [T],
    ) -> Mat<'r, T> {
        let at = (own.start * g + kvh) * c;
        match self {
            Self::Wide(v) => Mat::new(&v[at..], own.len(), c, g * c),
            Self::Half(v) => {
                let room = &mut room[..own.len() * c];
                vectorised(|| {
                    for (to, from) in room.chunks_mut(c).zip(v[at..].chunks(g * c)) {
                        to.iter_mut().zip(from).for_each(|(t, x)| *t = T::widened(cast::wide(*x)));
                    }
                });
                Mat::new(room, own.len(), c, c)
            }
        }
    }
}

/// Forward pass over a cache. Each task handles all query heads of one key/value head for a few queries,
/// so that even a single token splits into `g` tasks.
pub fn forward_cached<T: Real>(q: &Tensor, cache: &Cache, shape: Shape, how: &Causal<'_>) -> Result<Saved> {
    let Shape { t, h, g, c } = shape;
    let used = cache.blocks()[..cache.len().div_ceil(TOKENS)].iter().enumerate().map(|(b, of)| {
        let n = TOKENS.min(cache.len() - b * TOKENS);
        Ok([of[0].narrow(0, 0, n)?, of[1].narrow(0, 0, n)?])
    });
    let used = used.collect::<Result<Vec<_>>>()?;
    let stretches = used.iter().map(|[k, v]| Ok([Stretch::<T>::of(k)?, Stretch::of(v)?]));
    let stretches = stretches.collect::<Result<Vec<_>>>()?;
    let qv = view::<T>(q)?;
    let (qv, each) = (&*qv, h / g);
    let rows = (BLOCK / each).max(1);
    let group = |i: usize| {
        let (i0, kvh) = (i / g * rows, i % g);
        let count = rows.min(t - i0);
        let (block, m) = (Block::of(how, i0, count), count * each);
        // (cache block, token range in the block, number of visible keys before it)
        let parts = || {
            let Block { k0, n } = block;
            (k0 / TOKENS..(k0 + n).div_ceil(TOKENS)).map(move |s| {
                let (begin, end) = (k0.max(s * TOKENS), (k0 + n).min((s + 1) * TOKENS));
                (s, begin - s * TOKENS..end - s * TOKENS, begin - k0)
            })
        };
        let of_token = |r: usize| &qv[((i0 + r) * h + kvh * each) * c..][..each * c];
        let own: Vec<T> = (0..count).flat_map(of_token).copied().collect();
        let mut room = vec![T::zero(); TOKENS.min(block.n) * c];
        let (mut p, mut o) = (vec![T::zero(); m * block.n], vec![T::zero(); m * c]);
        for (s, tokens, before) in parts() {
            let km = stretches[s][0].head(tokens, kvh, (g, c), &mut room);
            gemm(&mut p[before..], block.n, false, Mat::new(&own, m, c, c), km.t(), T::of(how.scale), false);
        }
        let lse: Vec<T> = p
            .chunks_mut(block.n)
            .enumerate()
            .map(|(row, p)| {
                let (a, z) = block.seen(how, i0, row / each);
                p[..a].fill(T::zero());
                p[z..].fill(T::zero());
                vectorised(|| softmax(&mut p[a..z]))
            })
            .collect();
        for (s, tokens, before) in parts() {
            let pm = Mat::new(&p[before..], m, tokens.len(), block.n);
            let vm = stretches[s][1].head(tokens, kvh, (g, c), &mut room);
            gemm(&mut o, c, before > 0, pm, vm, T::one(), false);
        }
        (o, lse)
    };
    let groups: Vec<(Vec<T>, Vec<T>)> = (0..t.div_ceil(rows) * g).into_par_iter().map(group).collect();
    let (mut o, mut lse) = (vec![T::zero(); t * h * c], vec![T::zero(); t * h]);
    for (i, (own, own_lse)) in groups.iter().enumerate() {
        let (i0, kvh) = (i / g * rows, i % g);
        for (r, (own, own_lse)) in own.chunks(each * c).zip(own_lse.chunks(each)).enumerate() {
            let at = (i0 + r) * h + kvh * each;
            o[at * c..][..each * c].copy_from_slice(own);
            lse[at..][..each].copy_from_slice(own_lse);
        }
    }
    let o = tensor(o, (t, h * c), q.dtype())?;
    Ok(Saved { o: Padded::of(&o)?, lse: tensor(lse, (t, h), T::DTYPE)? })
}

/// Applies softmax in place and returns the log-sum-exp.
#[inline(always)]
fn softmax<T: Real>(row: &mut [T]) -> T {
    let largest = max(row);
    row.iter_mut().for_each(|x| *x = (*x - largest).exp());
    let total = sum(row);
    let inverse = T::one() / total;
    row.iter_mut().for_each(|x| *x *= inverse);
    largest + total.ln()
}

/// A block of queries of one head, in the backward pass.
pub(super) struct Item {
    pub head: usize,
    /// Key/value head.
    pub kvh: usize,
    /// First query.
    pub i0: usize,
    pub rows: usize,
    pub block: Block,
}

impl Item {
    /// All items, grouped by key/value head.
    pub fn all(Shape { t, h, g, .. }: Shape, how: &Causal<'_>) -> Vec<Self> {
        let item = |kvh: usize, i0: usize, head: usize| {
            let rows = BLOCK.min(t - i0);
            Self { head, kvh, i0, rows, block: Block::of(how, i0, rows) }
        };
        (0..g)
            .flat_map(|kvh| (0..t).step_by(BLOCK).map(move |i0| (kvh, i0)))
            .flat_map(|(kvh, i0)| (kvh * (h / g)..(kvh + 1) * (h / g)).map(move |head| (kvh, i0, head)))
            .map(|(kvh, i0, head)| item(kvh, i0, head))
            .collect()
    }

    /// Index of the first query in [t, h, c].
    pub fn at(&self, h: usize, c: usize) -> usize {
        (self.i0 * h + self.head) * c
    }
}

/// Backward buffers of an item: probabilities and score gradients [rows, n], query gradients [rows, c].
struct Kept<T> {
    p: Vec<T>,
    dp: Vec<T>,
    dq: Vec<T>,
}

/// Keys per task when summing key and value gradients.
pub(super) const KEYS: usize = 2 * BLOCK;

/// Items in flight per thread.
pub(super) const AT_ONCE: usize = 4;

/// Backward pass, `AT_ONCE` items per thread at a time: threads first compute the items, then sum the
/// gradients of disjoint key blocks, adding the items in order. Memory depends on the number of threads
/// and keys, not on heads; results depend on neither.
pub fn backward<T: Real>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    (o, lse): (&Tensor, &Tensor),
    d_o: &Tensor,
    how: &Causal<'_>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let shape = Shape::of(q, k, v, how.seqs)?;
    let Shape { t, h, g, c } = shape;
    let keys = how.seqs.keys();
    let kept = |l: &Ledger| {
        let items = (h * t.div_ceil(BLOCK)).min(AT_ONCE * l.machine().threads as usize);
        let rows = BLOCK.min(t);
        l.touch((T::DTYPE.size_in_bytes() * items * rows * (2 * how.most_keys() + c)) as u64);
    };
    let own = |x: &Tensor| (x.shape().clone(), q.dtype());
    if let Some([dq, dk, dv]) =
        ghost_products::<T, 3>(&[q, k, v, o, lse, d_o], [own(q), own(k), own(v)], kept)
    {
        return Ok((dq, dk, dv));
    }
    let (qv, kv, vv) = (view::<T>(q)?, view::<T>(k)?, view::<T>(v)?);
    let (ov, lv, dv) = (view::<T>(o)?, view::<T>(lse)?, view::<T>(d_o)?);
    let (qv, kv, vv, ov, lv, dv) = (&*qv, &*kv, &*vv, &*ov, &*lv, &*dv);
    let items = Item::all(shape, how);
    // allocate the maximum up front: a growing vector could reserve twice as much
    let most = items.iter().map(|i| i.block.n).max().unwrap_or(0);
    let (rows, at_once) = (BLOCK.min(t), AT_ONCE * rayon::current_num_threads());
    let zeros = |n: usize| vec![T::zero(); n];
    let mut kept: Vec<Kept<T>> = (0..at_once.min(items.len()))
        .map(|_| Kept { p: zeros(rows * most), dp: zeros(rows * most), dq: zeros(rows * c) })
        .collect();
    let (mut dq, mut dk, mut dval) = (zeros(t * h * c), zeros(keys * g * c), zeros(keys * g * c));
    let rows_of = |of: &Item| of.at(h, c);
    for now in items.chunks(at_once) {
        kept.par_iter_mut().zip(now).with_max_len(1).for_each(|(kept, of)| {
            let Item { head, kvh, i0, rows, block: Block { k0, n } } = *of;
            let (p, dp) = (&mut kept.p[..rows * n], &mut kept.dp[..rows * n]);
            let at = rows_of(of);
            let qm = Mat::new(&qv[at..], rows, c, h * c);
            let gm = Mat::new(&dv[at..], rows, c, h * c);
            let km = Mat::new(&kv[(k0 * g + kvh) * c..], n, c, g * c);
            let vm = Mat::new(&vv[(k0 * g + kvh) * c..], n, c, g * c);
            gemm(p, n, false, qm, km.t(), T::of(how.scale), false);
            gemm(dp, n, false, gm, vm.t(), T::one(), false);
            for r in 0..rows {
                let (a, z) = of.block.seen(how, i0, r);
                let (p, dp) = (&mut p[r * n..(r + 1) * n], &mut dp[r * n..(r + 1) * n]);
                let row = at + r * h * c;
                let delta = dot(&dv[row..row + c], &ov[row..row + c]);
                let lse = lv[(i0 + r) * h + head];
                p[..a].fill(T::zero());
                p[z..].fill(T::zero());
                dp[..a].fill(T::zero());
                dp[z..].fill(T::zero());
                let scale = T::of(how.scale);
                vectorised(|| {
                    for (p, dp) in p[a..z].iter_mut().zip(&mut dp[a..z]) {
                        *p = (*p - lse).exp();
                        *dp = *p * (*dp - delta) * scale;
                    }
                });
            }
            gemm(&mut kept.dq, c, false, Mat::new(dp, rows, n, n), km, T::one(), false);
        });
        for (kept, of) in kept.iter().zip(now) {
            for (r, row) in kept.dq.chunks(c).take(of.rows).enumerate() {
                dq[rows_of(of) + r * h * c..][..c].copy_from_slice(row);
            }
        }
        let blocks = dk.par_chunks_mut(KEYS * g * c).zip(dval.par_chunks_mut(KEYS * g * c));
        blocks.enumerate().for_each(|(b, (dk, dval))| {
            let (first, end) = (b * KEYS, keys.min((b + 1) * KEYS));
            for (kept, of) in kept.iter().zip(now) {
                let Item { kvh, rows, block: Block { k0, n }, .. } = *of;
                let (from, to) = (first.max(k0), end.min(k0 + n));
                if from >= to {
                    continue;
                }
                let seen = from - k0..rows * n;
                let pm = Mat::new(&kept.p[seen.clone()], rows, to - from, n).t();
                let dpm = Mat::new(&kept.dp[seen], rows, to - from, n).t();
                let at = rows_of(of);
                let qm = Mat::new(&qv[at..], rows, c, h * c);
                let gm = Mat::new(&dv[at..], rows, c, h * c);
                let into = ((from - first) * g + kvh) * c;
                gemm(&mut dval[into..], g * c, true, pm, gm, T::one(), false);
                gemm(&mut dk[into..], g * c, true, dpm, qm, T::one(), false);
            }
        });
    }
    drop(kept);
    Ok((
        tensor(dq, (t, h, c), q.dtype())?,
        tensor(dk, (keys, g, c), q.dtype())?,
        tensor(dval, (keys, g, c), q.dtype())?,
    ))
}
