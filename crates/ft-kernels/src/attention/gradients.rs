//! Backward pass on the CPU, for any kind of products.
//!
//! [`AT_ONCE`] items per thread at a time: threads first compute the items, then sum the gradients of disjoint
//! key blocks, adding the items in order.

use super::sequences::{Causal, Shape};
use super::tiles::BLOCK;
use crate::cpu;
use crate::gemm::Mat;
use candle_core::WithDType;
use std::ops::Range;

/// Keys per task when summing key and value gradients.
pub const KEYS: usize = 2 * BLOCK;

/// Items in flight per thread.
pub const AT_ONCE: usize = 4;

/// Keys visible to one block of queries of one head.
pub struct Block {
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

/// A block of queries of one head, in the backward pass.
pub struct Item {
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

    /// Rows [rows, c] of a matrix [t, h, c].
    pub fn queries<'a, T>(&self, x: &'a [T], Shape { h, c, .. }: Shape) -> Mat<'a, T> {
        Mat::new(&x[self.at(h, c)..], self.rows, c, h * c)
    }

    /// Rows of the visible keys `own` in a matrix [keys, g, c].
    pub fn keys<'a, T>(&self, x: &'a [T], Shape { g, c, .. }: Shape, own: Range<usize>) -> Mat<'a, T> {
        Mat::new(&x[((self.block.k0 + own.start) * g + self.kvh) * c..], own.len(), c, g * c)
    }
}

/// Buffers of an item: probabilities and score gradients [rows, n], query gradients [rows, c].
pub struct Tile<T> {
    pub p: Vec<T>,
    pub dp: Vec<T>,
    pub dq: Vec<T>,
}

/// Values of q, k, v, output and output gradient [.., heads, c], and log-sum-exp [t, h].
pub struct Inputs<'a, T, S> {
    pub q: &'a [T],
    pub k: &'a [T],
    pub v: &'a [T],
    pub o: &'a [T],
    pub d_o: &'a [T],
    pub lse: &'a [S],
}

/// Products of a backward pass with operands `T` and sums `S`.
pub trait Products<T, S> {
    /// Computes probabilities, score gradients and query gradients of an item.
    fn tile(inputs: &Inputs<'_, T, S>, shape: Shape, how: &Causal<'_>, of: &Item, tile: &mut Tile<T>);

    /// `to += a b`, with row stride `stride`.
    fn add(to: &mut [S], stride: usize, a: Mat<'_, T>, b: Mat<'_, T>);
}

/// Gradients of q [t, h, c], k and v [keys, g, c].
pub fn gradients<T: WithDType, S: WithDType, P: Products<T, S>>(
    inputs: &Inputs<'_, T, S>,
    shape: Shape,
    how: &Causal<'_>,
) -> (Vec<T>, Vec<S>, Vec<S>) {
    let Shape { t, h, g, c } = shape;
    let keys = how.seqs.keys();
    let items = Item::all(shape, how);
    // allocate the maximum up front: a growing vector could reserve twice as much
    let most = items.iter().map(|i| i.block.n).max().unwrap_or(0);
    let (rows, at_once) = (BLOCK.min(t), AT_ONCE * rayon::current_num_threads());
    let zeros = |n: usize| vec![T::zero(); n];
    let tile = |_| Tile { p: zeros(rows * most), dp: zeros(rows * most), dq: zeros(rows * c) };
    let mut tiles: Vec<Tile<T>> = (0..at_once.min(items.len())).map(tile).collect();
    let mut dq = zeros(t * h * c);
    let (mut dk, mut dv) = (vec![S::zero(); keys * g * c], vec![S::zero(); keys * g * c]);
    for now in items.chunks(at_once) {
        cpu::each(tiles.iter_mut().zip(now), |(tile, of)| P::tile(inputs, shape, how, of, tile));
        for (tile, of) in tiles.iter().zip(now) {
            for (r, row) in tile.dq.chunks(c).take(of.rows).enumerate() {
                dq[of.at(h, c) + r * h * c..][..c].copy_from_slice(row);
            }
        }
        let blocks = dk.chunks_mut(KEYS * g * c).zip(dv.chunks_mut(KEYS * g * c));
        cpu::each(blocks.enumerate(), |(b, (dk, dv))| {
            let (first, end) = (b * KEYS, keys.min((b + 1) * KEYS));
            for (tile, of) in tiles.iter().zip(now) {
                let Item { kvh, rows, block: Block { k0, n }, .. } = *of;
                let (from, to) = (first.max(k0), end.min(k0 + n));
                if from >= to {
                    continue;
                }
                let seen = from - k0..rows * n;
                let pm = Mat::new(&tile.p[seen.clone()], rows, to - from, n).t();
                let dpm = Mat::new(&tile.dp[seen], rows, to - from, n).t();
                let into = ((from - first) * g + kvh) * c;
                P::add(&mut dv[into..], g * c, pm, of.queries(inputs.d_o, shape));
                P::add(&mut dk[into..], g * c, dpm, of.queries(inputs.q, shape));
            }
        });
    }
    (dq, dk, dv)
}
