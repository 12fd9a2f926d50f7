//! CPU attention: blocks of queries against all keys visible to the block.

use super::cache::{BLOCK as TOKENS, Cache};
use super::gradients::{AT_ONCE, Block, Inputs, Item, Products, Tile, gradients};
use super::sequences::{Causal, Saved, Shape};
use super::tiles::BLOCK;
use crate::Tensor;
use crate::cpu::blocks::Values;
use crate::cpu::{self, Float, dot, ghost_products, max, sum, tensor, vectorised, view};
use crate::gemm::{Mat, gemm};
use crate::ledger::Ledger;
use crate::padded::Padded;
use candle_core::Result;
use std::ops::Range;

/// Forward pass. Each task handles [`BLOCK`] queries, one head after another.
pub fn forward<T: Float>(q: &Tensor, k: &Tensor, v: &Tensor, how: &Causal<'_>) -> Result<Saved> {
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
    cpu::each(o.chunks_mut(BLOCK * h * c).zip(lse.chunks_mut(BLOCK * h)).enumerate(), |(b, (o, lse))| {
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
    });
    let o = tensor(o, (t, h * c), q.dtype())?;
    Ok(Saved { o: Padded::of(&o)?, lse: tensor(lse, (t, h), T::DTYPE)? })
}

/// Keys or values of head `kvh` in a cache block [tokens, g, c], for the tokens `own`: [tokens, c]. `room` receives
/// widened values.
fn of_head<'r, T: Float>(
    block: &'r Values<'_, T>,
    own: Range<usize>,
    kvh: usize,
    (g, c): (usize, usize),
    room: &'r mut [T],
) -> Mat<'r, T> {
    let at = (own.start * g + kvh) * c;
    match block {
        Values::Whole(v) => Mat::new(&v[at..], own.len(), c, g * c),
        Values::Halves(v) => {
            let room = &mut room[..own.len() * c];
            vectorised(|| {
                for (to, from) in room.chunks_mut(c).zip(v[at..].chunks(g * c)) {
                    to.iter_mut().zip(from).for_each(|(t, x)| *t = T::widened(cpu::wide(*x)));
                }
            });
            Mat::new(room, own.len(), c, c)
        }
    }
}

/// Forward pass over a cache. Each task handles all query heads of one key/value head for a few queries,
/// so that even a single token splits into `g` tasks.
pub fn forward_cached<T: Float>(q: &Tensor, cache: &Cache, shape: Shape, how: &Causal<'_>) -> Result<Saved> {
    let Shape { t, h, g, c } = shape;
    let used = cache.blocks()[..cache.len().div_ceil(TOKENS)].iter().enumerate().map(|(b, of)| {
        let n = TOKENS.min(cache.len() - b * TOKENS);
        Ok([of[0].narrow(0, 0, n)?, of[1].narrow(0, 0, n)?])
    });
    let used = used.collect::<Result<Vec<_>>>()?;
    let blocks = used.iter().map(|[k, v]| Ok([Values::<T>::of(k)?, Values::of(v)?]));
    let blocks = blocks.collect::<Result<Vec<_>>>()?;
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
            let km = of_head(&blocks[s][0], tokens, kvh, (g, c), &mut room);
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
            let vm = of_head(&blocks[s][1], tokens, kvh, (g, c), &mut room);
            gemm(&mut o, c, before > 0, pm, vm, T::one(), false);
        }
        (o, lse)
    };
    let groups: Vec<(Vec<T>, Vec<T>)> = cpu::map(0..t.div_ceil(rows) * g, group);
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
fn softmax<T: Float>(row: &mut [T]) -> T {
    let largest = max(row);
    row.iter_mut().for_each(|x| *x = (*x - largest).exp());
    let total = sum(row);
    let inverse = T::one() / total;
    row.iter_mut().for_each(|x| *x *= inverse);
    largest + total.ln()
}

/// See [`super::backward`]. Memory depends on the number of threads and keys, not on heads; results depend on
/// neither.
pub fn backward<T: Float>(
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
    let tiles = |l: &Ledger| {
        let items = (h * t.div_ceil(BLOCK)).min(AT_ONCE * l.machine().threads as usize);
        let rows = BLOCK.min(t);
        l.touch((T::DTYPE.size_in_bytes() * items * rows * (2 * how.most_keys() + c)) as u64);
    };
    let own = |x: &Tensor| (x.shape().clone(), q.dtype());
    if let Some([dq, dk, dv]) =
        ghost_products::<T, 3>(&[q, k, v, o, lse, d_o], [own(q), own(k), own(v)], tiles)
    {
        return Ok((dq, dk, dv));
    }
    let (qv, kv, vv) = (view::<T>(q)?, view::<T>(k)?, view::<T>(v)?);
    let (ov, lv, dv) = (view::<T>(o)?, view::<T>(lse)?, view::<T>(d_o)?);
    let inputs = Inputs { q: &qv, k: &kv, v: &vv, o: &ov, d_o: &dv, lse: &lv };
    let (dq, dk, dv) = gradients::<T, T, Widened>(&inputs, shape, how);
    Ok((
        tensor(dq, (t, h, c), q.dtype())?,
        tensor(dk, (keys, g, c), q.dtype())?,
        tensor(dv, (keys, g, c), q.dtype())?,
    ))
}

/// Products in the dtype of the arithmetic.
struct Widened;

impl<T: Float> Products<T, T> for Widened {
    fn tile(inputs: &Inputs<'_, T, T>, shape: Shape, how: &Causal<'_>, of: &Item, tile: &mut Tile<T>) {
        let Shape { h, c, .. } = shape;
        let Item { head, i0, rows, block: Block { n, .. }, .. } = *of;
        let (p, dp) = (&mut tile.p[..rows * n], &mut tile.dp[..rows * n]);
        let [km, vm] = [inputs.k, inputs.v].map(|x| of.keys(x, shape, 0..n));
        gemm(p, n, false, of.queries(inputs.q, shape), km.t(), T::of(how.scale), false);
        gemm(dp, n, false, of.queries(inputs.d_o, shape), vm.t(), T::one(), false);
        for r in 0..rows {
            let (a, z) = of.block.seen(how, i0, r);
            let (p, dp) = (&mut p[r * n..(r + 1) * n], &mut dp[r * n..(r + 1) * n]);
            let row = of.at(h, c) + r * h * c;
            let delta = dot(&inputs.d_o[row..row + c], &inputs.o[row..row + c]);
            let lse = inputs.lse[(i0 + r) * h + head];
            for unseen in [0..a, z..n] {
                p[unseen.clone()].fill(T::zero());
                dp[unseen].fill(T::zero());
            }
            let scale = T::of(how.scale);
            vectorised(|| {
                for (p, dp) in p[a..z].iter_mut().zip(&mut dp[a..z]) {
                    *p = (*p - lse).exp();
                    *dp = *p * (*dp - delta) * scale;
                }
            });
        }
        gemm(&mut tile.dq, c, false, Mat::new(dp, rows, n, n), km, T::one(), false);
    }

    fn add(to: &mut [T], stride: usize, a: Mat<'_, T>, b: Mat<'_, T>) {
        gemm(to, stride, true, a, b, T::one(), false);
    }
}
