//! The CPU's attention: blocks of queries against the keys that any of them sees.

use super::cache::{BLOCK as TOKENS, Cache};
use super::{Causal, Saved, Shape};
use crate::kernel::Tensor;
use crate::kernel::cpu::{Real, View, dot, ghosts, max, sum, tensor, view};
use crate::kernel::gemm::{Mat, gemm};
use crate::kernel::ledger::Ledger;
use crate::kernel::padded::Padded;
use candle_core::Result;
use rayon::prelude::*;

/// Query rows that one block takes.
pub const BLOCK: usize = 64;

/// One block of queries of one head: the keys that any of them sees, and which of those each sees.
struct Block {
    /// First key.
    k0: usize,
    /// Number of keys.
    n: usize,
}

impl Block {
    fn of(how: &Causal<'_>, i0: usize, rows: usize) -> Self {
        let first = how.seqs.first_query + i0;
        let k0 = how.first_key(first);
        Self { k0, n: first + rows - k0 }
    }

    /// Columns of the block that its row `r` sees.
    fn seen(&self, how: &Causal<'_>, i0: usize, r: usize) -> (usize, usize) {
        let i = how.seqs.first_query + i0 + r;
        (how.first_key(i) - self.k0, i + 1 - self.k0)
    }
}

/// Forward: a task takes [`BLOCK`] queries, head after head.
pub fn forward<T: Real>(q: &Tensor, k: &Tensor, v: &Tensor, how: &Causal<'_>) -> Result<Saved> {
    let Shape { t, h, g, c } = Shape::of(q, k, v, how.seqs)?;
    let size = T::DTYPE.size_in_bytes();
    // the probabilities of one block and head on each thread
    let blocks = |l: &Ledger| {
        let running = t.div_ceil(BLOCK).min(l.machine().threads as usize);
        l.touch((size * running * BLOCK.min(t) * how.most_keys()) as u64);
    };
    let out = [((t, h * c).into(), q.dtype()), ((t, h).into(), T::DTYPE)];
    if let Some([o, lse]) = ghosts::<T, 2>(&[q, k, v], out, blocks) {
        return Ok(Saved { o: Padded::of(&o)?, lse });
    }
    let keys = how.seqs.keys().max(1);
    attend(q, &[[view::<T>(k)?, view::<T>(v)?]], keys, Shape { t, h, g, c }, how)
}

/// Forward, of the keys and values of a cache.
pub fn forward_cached<T: Real>(q: &Tensor, cache: &Cache, shape: Shape, how: &Causal<'_>) -> Result<Saved> {
    let some = |(b, of): (usize, &[Tensor; 2])| -> Result<[Tensor; 2]> {
        let n = TOKENS.min(cache.len() - b * TOKENS);
        Ok([of[0].narrow(0, 0, n)?, of[1].narrow(0, 0, n)?])
    };
    let used = &cache.blocks()[..cache.len().div_ceil(TOKENS)];
    let blocks = used.iter().enumerate().map(some).collect::<Result<Vec<_>>>()?;
    let views = blocks.iter().map(|[k, v]| Ok([view::<T>(k)?, view::<T>(v)?])).collect::<Result<Vec<_>>>()?;
    attend(q, &views, TOKENS, shape, how)
}

/// Forward, of keys and values in stretches of `each` tokens.
fn attend<T: Real>(
    q: &Tensor,
    stretches: &[[View<'_, T>; 2]],
    each: usize,
    Shape { t, h, g, c }: Shape,
    how: &Causal<'_>,
) -> Result<Saved> {
    let qv = view::<T>(q)?;
    let qv = &*qv;
    let stretches: Vec<[&[T]; 2]> = stretches.iter().map(|[k, v]| [&**k, &**v]).collect();
    // of the keys from `k0` on: a stretch of keys and values from there, their number, and how many there are before
    let parts = |k0: usize, n: usize| {
        (k0 / each..(k0 + n).div_ceil(each)).map(move |s| {
            let (begin, end) = (k0.max(s * each), (k0 + n).min((s + 1) * each));
            (s, begin - s * each, end - begin, begin - k0)
        })
    };
    let (mut o, mut lse) = (vec![T::zero(); t * h * c], vec![T::zero(); t * h]);
    o.par_chunks_mut(BLOCK * h * c).zip(lse.par_chunks_mut(BLOCK * h)).enumerate().for_each(
        |(b, (o, lse))| {
            let i0 = b * BLOCK;
            let rows = lse.len() / h;
            let block = Block::of(how, i0, rows);
            let n = block.n;
            let mut p = vec![T::zero(); rows * n];
            for head in 0..h {
                let kvh = head / (h / g);
                let qm = Mat::new(&qv[(i0 * h + head) * c..], rows, c, h * c);
                for (s, first, count, before) in parts(block.k0, n) {
                    let km = Mat::new(&stretches[s][0][(first * g + kvh) * c..], count, c, g * c);
                    gemm(&mut p[before..], n, false, qm, km.t(), T::of(how.scale), false);
                }
                for (r, row) in p.chunks_mut(n).enumerate() {
                    let (a, z) = block.seen(how, i0, r);
                    row[..a].fill(T::zero());
                    row[z..].fill(T::zero());
                    let seen = &mut row[a..z];
                    let largest = max(seen);
                    for x in seen.iter_mut() {
                        *x = (*x - largest).exp();
                    }
                    let total = sum(seen);
                    let inverse = T::one() / total;
                    seen.iter_mut().for_each(|x| *x *= inverse);
                    lse[r * h + head] = largest + total.ln();
                }
                for (s, first, count, before) in parts(block.k0, n) {
                    let pm = Mat::new(&p[before..], rows, count, n);
                    let vm = Mat::new(&stretches[s][1][(first * g + kvh) * c..], count, c, g * c);
                    gemm(&mut o[head * c..], h * c, before > 0, pm, vm, T::one(), false);
                }
            }
        },
    );
    let o = tensor(o, (t, h * c), q.dtype())?;
    Ok(Saved { o: Padded::of(&o)?, lse: tensor(lse, (t, h), T::DTYPE)? })
}

/// Backward: a task takes a query head.
pub fn backward<T: Real>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    (o, lse): (&Tensor, &Tensor),
    d_o: &Tensor,
    how: &Causal<'_>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let Shape { t, h, g, c } = Shape::of(q, k, v, how.seqs)?;
    let keys = how.seqs.keys();
    if let Some(g) = q.ghost() {
        let (l, size) = (g.ledger(), T::DTYPE.size_in_bytes());
        // each query head's dq, dk and dv, until all are summed; of those at work the probabilities and their gradient
        let _heads = l.hold((size * h * c * (t + 2 * keys)) as u64);
        let running = h.min(l.machine().threads as usize);
        l.touch((size * running * 2 * BLOCK.min(t) * how.most_keys()) as u64);
        let own = |x: &Tensor| (x.shape().clone(), q.dtype());
        if let Some([dq, dk, dv]) = ghosts::<T, 3>(&[q, k, v, o, lse, d_o], [own(q), own(k), own(v)], |_| ())
        {
            return Ok((dq, dk, dv));
        }
    }
    let (qv, kv, vv) = (view::<T>(q)?, view::<T>(k)?, view::<T>(v)?);
    let (ov, lv, dv) = (view::<T>(o)?, view::<T>(lse)?, view::<T>(d_o)?);
    let (qv, kv, vv, ov, lv, dv) = (&*qv, &*kv, &*vv, &*ov, &*lv, &*dv);
    let most = (0..t).step_by(BLOCK).map(|i0| Block::of(how, i0, BLOCK.min(t - i0)).n).max().unwrap_or(0);
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
                let block = Block::of(how, i0, rows);
                let (k0, n) = (block.k0, block.n);
                let (p, dp) = (&mut p[..rows * n], &mut dp[..rows * n]);
                let at = (i0 * h + head) * c;
                let qm = Mat::new(&qv[at..], rows, c, h * c);
                let gm = Mat::new(&dv[at..], rows, c, h * c);
                let km = Mat::new(&kv[(k0 * g + kvh) * c..], n, c, g * c);
                let vm = Mat::new(&vv[(k0 * g + kvh) * c..], n, c, g * c);
                gemm(p, n, false, qm, km.t(), T::of(how.scale), false);
                gemm(dp, n, false, gm, vm.t(), T::one(), false);
                for r in 0..rows {
                    let (a, z) = block.seen(how, i0, r);
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
                        *dp = *p * (*dp - delta) * T::of(how.scale);
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
