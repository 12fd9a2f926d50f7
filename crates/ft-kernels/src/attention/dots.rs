//! CPU attention in bf16 by dot-product instructions. Same blocking as `cpu`; scores and sums are f32,
//! probabilities and their gradients are rounded to bf16 as in GPU kernels.

use super::gradients::{AT_ONCE, Block, Inputs, Item, KEYS, Products, Tile, gradients};
use super::sequences::{Causal, Saved, Shape};
use super::tiles::BLOCK;
use crate::Tensor;
use crate::cpu::{self, Float, Halves, dot, ghost_products_in, max, sum, tensor, vectorised, view};
use crate::cpu::{narrow, wide};
use crate::gemm::pairs::{Onto, Right, packing, product_onto};
use crate::gemm::{Mat, serial};
use crate::ledger::Ledger;
use crate::padded::Padded;
use candle_core::{DType, Device, Result};
use half::bf16;

/// Keys per step of the backward pass; bounds the f32 scores of a thread.
const CHUNK: usize = 4 * BLOCK;

/// See [`super::cpu::forward`].
pub fn forward(q: &Tensor, k: &Tensor, v: &Tensor, how: &Causal<'_>) -> Result<Saved> {
    let Shape { t, h, g, c } = Shape::of(q, k, v, how.seqs)?;
    let [q, k, v] = [q.contiguous()?, k.contiguous()?, v.contiguous()?];
    // each thread holds scores, probabilities and output of one block and head
    let blocks = |l: &Ledger| {
        let (rows, keys) = (BLOCK.min(t), how.most_keys());
        let packed = |sizes| packing(sizes, 1, (false, false), false);
        let packed = packed((rows, c, keys)).max(packed((rows, keys, c)));
        let each = (rows * (6 * keys + 4 * c)) as u64 + packed;
        l.touch(t.div_ceil(BLOCK).min(l.machine().threads as usize) as u64 * each);
    };
    let out = [((t, h * c).into(), DType::BF16), ((t, h).into(), DType::F32)];
    if let Some([o, lse]) = ghost_products_in::<f32, 2>(is_half, &[&q, &k, &v], out, blocks) {
        return Ok(Saved { o: Padded::of(&o)?, lse });
    }
    let (qv, kv, vv) = (Halves::of(&q)?, Halves::of(&k)?, Halves::of(&v)?);
    let (qv, kv, vv): (&[bf16], &[bf16], &[bf16]) = (&qv, &kv, &vv);
    let (mut o, mut lse) = (vec![bf16::ZERO; t * h * c], vec![0f32; t * h]);
    let block = |(b, (o, lse)): (usize, (&mut [bf16], &mut [f32]))| {
        let i0 = b * BLOCK;
        let rows = lse.len() / h;
        let block = Block::of(how, i0, rows);
        let Block { k0, n } = block;
        let (mut scores, mut p) = (vec![0f32; rows * n], vec![bf16::ZERO; rows * n]);
        let mut own = vec![0f32; rows * c];
        for head in 0..h {
            let qm = of_head(qv, (i0 * h + head) * c, (rows, c), h);
            let at = (k0 * g + head / (h / g)) * c;
            let [km, vm] = [kv, vv].map(|x| of_head(x, at, (n, c), g));
            product(&mut scores, n, false, (qm, km.t()), how.scale);
            let mut totals = [0f32; BLOCK];
            for (r, (scores, p)) in scores.chunks_mut(n).zip(p.chunks_mut(n)).enumerate() {
                let (a, z) = block.seen(how, i0, r);
                p[..a].fill(bf16::ZERO);
                p[z..].fill(bf16::ZERO);
                let (largest, total) = vectorised(|| exponentials(&mut scores[a..z], &mut p[a..z]));
                totals[r] = total;
                lse[r * h + head] = largest + total.ln();
            }
            product(&mut own, c, false, (Mat::new(&p, rows, n, n), vm), 1.0);
            for (r, (own, total)) in own.chunks(c).zip(totals).enumerate() {
                let to = &mut o[(r * h + head) * c..][..c];
                vectorised(|| to.iter_mut().zip(own).for_each(|(o, x)| *o = narrow(*x / total)));
            }
        }
    };
    cpu::each(o.chunks_mut(BLOCK * h * c).zip(lse.chunks_mut(BLOCK * h)).enumerate(), block);
    let o = Tensor::from_vec(o, (t, h * c), &Device::Cpu)?;
    Ok(Saved { o: Padded::of(&o)?, lse: tensor(lse, (t, h), DType::F32)? })
}

/// Matrix [rows, c] of one of `heads` heads, starting at value `at`.
fn of_head(x: &[bf16], at: usize, (rows, c): (usize, usize), heads: usize) -> Mat<'_, bf16> {
    Mat::new(&x[at..], rows, c, heads * c)
}

fn is_half(dtype: DType) -> bool {
    dtype == DType::BF16
}

/// `dst (+)= alpha a b` on the current thread.
fn product(dst: &mut [f32], stride: usize, add: bool, (a, b): (Mat<'_, bf16>, Mat<'_, bf16>), alpha: f64) {
    serial(|| product_onto(Onto::Wide(dst), stride, add, a, Right::Stored(b), alpha as f32));
}

/// `p = exp(scores - max)`, rounded to bf16. Returns the maximum and the sum of the unrounded
/// exponentials.
#[inline(always)]
fn exponentials(scores: &mut [f32], p: &mut [bf16]) -> (f32, f32) {
    let largest = max(scores);
    scores.iter_mut().for_each(|x| *x = Float::exp(*x - largest));
    p.iter_mut().zip(&*scores).for_each(|(p, x)| *p = narrow(*x));
    (largest, sum(scores))
}

/// See [`super::cpu::backward`].
pub fn backward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    (o, lse): (&Tensor, &Tensor),
    d_o: &Tensor,
    how: &Causal<'_>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let shape = Shape::of(q, k, v, how.seqs)?;
    let Shape { t, h, g, c } = shape;
    let [q, k, v, o, d_o] =
        [q.contiguous()?, k.contiguous()?, v.contiguous()?, o.contiguous()?, d_o.contiguous()?];
    let keys = how.seqs.keys();
    let during = |l: &Ledger| {
        let (rows, most, threads) = (BLOCK.min(t), how.most_keys(), l.machine().threads as usize);
        let items = h * t.div_ceil(BLOCK);
        let kept = items.min(AT_ONCE * threads) * rows * 2 * (2 * most + c);
        let packed = |sizes, turned| packing(sizes, 1, (turned, false), false) as usize;
        let chunk = CHUNK.min(most);
        let first = 8 * rows * chunk + packed((rows, c, chunk), false).max(packed((rows, most, c), false));
        let then = packed((KEYS.min(keys), rows, c), true);
        let at_work = (items.min(threads) * first).max(keys.div_ceil(KEYS).min(threads) * then);
        // key and value gradients accumulate in f32
        let wider = 2 * keys * g * c;
        l.touch((2 * wider + wider.max(kept + at_work)) as u64);
    };
    let out = [&q, &k, &v].map(|x| (x.shape().clone(), DType::BF16));
    if let Some([dq, dk, dv]) =
        ghost_products_in::<f32, 3>(is_half, &[&q, &k, &v, &o, lse, &d_o], out, during)
    {
        return Ok((dq, dk, dv));
    }
    let (qv, kv, vv) = (Halves::of(&q)?, Halves::of(&k)?, Halves::of(&v)?);
    let (ov, lv, dv) = (Halves::of(&o)?, view::<f32>(lse)?, Halves::of(&d_o)?);
    let (qv, kv, vv): (&[bf16], &[bf16], &[bf16]) = (&qv, &kv, &vv);
    let (ov, lv, dv): (&[bf16], &[f32], &[bf16]) = (&ov, &lv, &dv);
    let inputs = Inputs { q: qv, k: kv, v: vv, o: ov, d_o: dv, lse: lv };
    let (dq, dk, dv) = gradients::<bf16, f32, Dots>(&inputs, shape, how);
    Ok((
        Tensor::from_vec(dq, (t, h, c), &Device::Cpu)?,
        tensor(dk, (keys, g, c), DType::BF16)?,
        tensor(dv, (keys, g, c), DType::BF16)?,
    ))
}

/// Products by dot-product instructions.
struct Dots;

impl Products<bf16, f32> for Dots {
    fn tile(
        inputs: &Inputs<'_, bf16, f32>,
        shape: Shape,
        how: &Causal<'_>,
        of: &Item,
        tile: &mut Tile<bf16>,
    ) {
        let Shape { h, c, .. } = shape;
        let Item { head, i0, rows, block: Block { n, .. }, .. } = *of;
        let (qm, gm) = (of.queries(inputs.q, shape), of.queries(inputs.d_o, shape));
        let mut deltas = [0f32; BLOCK];
        for (r, delta) in deltas.iter_mut().enumerate().take(rows) {
            let own = of.at(h, c) + r * h * c..of.at(h, c) + r * h * c + c;
            *delta = vectorised(|| wide_dot(&inputs.d_o[own.clone()], &inputs.o[own]));
        }
        let mut both = vec![0f32; 2 * rows * CHUNK.min(n)];
        for from in (0..n).step_by(CHUNK) {
            let some = CHUNK.min(n - from);
            let (scores, d_scores) = both.split_at_mut(rows * some);
            let keys = from..from + some;
            product(scores, some, false, (qm, of.keys(inputs.k, shape, keys.clone()).t()), how.scale);
            product(d_scores, some, false, (gm, of.keys(inputs.v, shape, keys).t()), 1.0);
            for r in 0..rows {
                let (a, z) = of.block.seen(how, i0, r);
                let (a, z) = (a.clamp(from, from + some) - from, z.clamp(from, from + some) - from);
                let to = r * n + from..r * n + from + some;
                let (p, dp) = (&mut tile.p[to.clone()], &mut tile.dp[to]);
                for unseen in [0..a, z..some] {
                    p[unseen.clone()].fill(bf16::ZERO);
                    dp[unseen].fill(bf16::ZERO);
                }
                let (lse, delta, scale) = (inputs.lse[(i0 + r) * h + head], deltas[r], how.scale as f32);
                let (scores, d_scores) = (&mut scores[r * some..][a..z], &mut d_scores[r * some..][a..z]);
                vectorised(|| {
                    for (x, dx) in scores.iter_mut().zip(d_scores.iter_mut()) {
                        *x = Float::exp(*x - lse);
                        *dx = *x * (*dx - delta) * scale;
                    }
                    for (half, x) in [(&mut p[a..z], scores), (&mut dp[a..z], d_scores)] {
                        half.iter_mut().zip(x).for_each(|(h, x)| *h = narrow(*x));
                    }
                });
            }
        }
        let (dpm, km) = (Mat::new(&tile.dp, rows, n, n), of.keys(inputs.k, shape, 0..n));
        serial(|| product_onto(Onto::Half(&mut tile.dq), c, false, dpm, Right::Stored(km), 1.0));
    }

    fn add(to: &mut [f32], stride: usize, a: Mat<'_, bf16>, b: Mat<'_, bf16>) {
        product(to, stride, true, (a, b), 1.0);
    }
}

/// Dot product in f32.
#[inline(always)]
fn wide_dot(a: &[bf16], b: &[bf16]) -> f32 {
    const SOME: usize = 64;
    let (mut x, mut y) = ([0f32; SOME], [0f32; SOME]);
    let mut sum = 0.0;
    for (a, b) in a.chunks(SOME).zip(b.chunks(SOME)) {
        for (to, from) in [(&mut x, a), (&mut y, b)] {
            to.iter_mut().zip(from).for_each(|(t, v)| *t = wide(*v));
        }
        sum += dot(&x[..a.len()], &y[..b.len()]);
    }
    sum
}
