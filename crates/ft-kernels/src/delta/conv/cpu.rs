//! The convolution on the CPU.

use super::sizes;
use crate::Tensor;
use crate::attention::Sequences;
use crate::cpu::blocks::{Values, ghosts, written};
use crate::cpu::{Float, tensor, vectorised, view};
use crate::ledger::Ledger;
use crate::swiglu::logistic;
use crate::tensor::Ghost;
use candle_core::Result;

/// Rows of a task. Fixed, so that sums over rows have the same order for any number of threads.
const ROWS: usize = 128;

/// The taps by distance `[n, c]`: row j multiplies the token j before.
fn by_distance<T: Float>(w: &[T], c: usize, taps: usize) -> Vec<T> {
    let of = |i: usize| w[i % c * taps + taps - 1 - i / c];
    (0..taps * c).map(of).collect()
}

/// Position of every token in its document, and tokens of the document after it.
fn places(docs: &[usize]) -> Vec<(usize, usize)> {
    docs.iter().flat_map(|n| (0..*n).map(move |i| (i, n - 1 - i))).collect()
}

/// Sums before SiLU of a token's row.
fn sums<T: Float>(x: &Values<'_, T>, w: &[T], (token, at): (usize, usize), room: &mut Vec<T>, out: &mut [T]) {
    let c = out.len();
    out.fill(T::zero());
    for (j, w) in w.chunks(c).enumerate().take(at + 1) {
        let x = x.read((token - j) * c..(token - j + 1) * c, room);
        vectorised(|| out.iter_mut().zip(w).zip(x).for_each(|((o, w), x)| *o += *w * *x));
    }
}

/// See [`super::forward`].
pub fn forward<T: Float>(x: &Tensor, w: &Tensor, seqs: Option<&Sequences>) -> Result<Tensor> {
    let ((t, c, taps), like) = (sizes(x, w)?, (x.shape(), x.dtype()));
    let rooms = |l: &Ledger| l.touch(((taps * c) * T::DTYPE.size_in_bytes() + 16 * t) as u64);
    if let Some([y]) = ghosts::<T, 1>(&[x, w], like, c, rooms) {
        return Ok(y);
    }
    let places = seqs.map_or_else(|| places(&[t]), |s| places(&s.docs));
    let (x, w) = (Values::<T>::of(x)?, by_distance(&view::<T>(w)?, c, taps));
    let ([y], _) = written::<T, _, 1>(like, ROWS * c, |from, out| {
        let mut room = Vec::new();
        out.each(c, |at, [y]| {
            let token = (from + at) / c;
            sums(&x, &w, (token, places[token].0), &mut room, y);
            vectorised(|| y.iter_mut().for_each(|y| *y *= logistic(*y)));
        });
    })?;
    Ok(y)
}

/// See [`super::backward`].
pub fn backward<T: Float>(
    x: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    seqs: &Sequences,
    want_dw: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let ((t, c, taps), like) = (sizes(x, w)?, (x.shape(), x.dtype()));
    let parts = |t: usize| if want_dw { t.div_ceil(ROWS) } else { 0 };
    let rooms = |l: &Ledger| {
        let each = (ROWS + taps) * c * l.machine().threads as usize;
        l.touch((((1 + parts(t)) * taps * c + each) * T::DTYPE.size_in_bytes() + 16 * t) as u64);
    };
    if let Some([dx]) = ghosts::<T, 1>(&[x, w, dy], like, c, rooms) {
        let ledger = dx.ghost().map(Ghost::ledger);
        let dw = ledger.filter(|_| want_dw).map(|l| Ghost::new(l, (1, c * taps), T::DTYPE).into());
        return Ok((dx, dw));
    }
    let (x, dy, places) = (Values::<T>::of(x)?, Values::<T>::of(dy)?, places(&seqs.docs));
    let w = by_distance(&view::<T>(w)?, c, taps);
    let ([dx], partial) = written::<T, _, 1>(like, ROWS * c, |from, out| {
        let (first, mut room, mut dw) =
            (from / c, Vec::new(), vec![T::zero(); if want_dw { taps * c } else { 0 }]);
        // gradients of the sums, of this task's rows and of those that reach back to them
        let rows = ROWS.min(t - first);
        let last = (first + rows + taps - 1).min(t);
        let mut ds = vec![T::zero(); (last - first) * c];
        let mut of_g = Vec::new();
        for (token, ds) in (first..last).zip(ds.chunks_mut(c)) {
            sums(&x, &w, (token, places[token].0), &mut room, ds);
            let g = dy.read(token * c..(token + 1) * c, &mut of_g);
            vectorised(|| {
                for (s, g) in ds.iter_mut().zip(g) {
                    let open = logistic(*s);
                    *s = *g * open * (T::one() + *s * (T::one() - open));
                }
            });
            if !want_dw || token >= first + rows {
                continue;
            }
            for (j, dw) in dw.chunks_mut(c).enumerate().take(places[token].0 + 1) {
                let x = x.read((token - j) * c..(token - j + 1) * c, &mut room);
                vectorised(|| dw.iter_mut().zip(&*ds).zip(x).for_each(|((d, s), x)| *d += *s * *x));
            }
        }
        out.each(c, |at, [dx]| {
            let row = at / c;
            dx.fill(T::zero());
            for (j, w) in w.chunks(c).enumerate().take(places[first + row].1 + 1) {
                let ds = &ds[(row + j) * c..][..c];
                vectorised(|| dx.iter_mut().zip(w).zip(ds).for_each(|((d, w), s)| *d += *w * *s));
            }
        });
        dw
    })?;
    if !want_dw {
        return Ok((dx, None));
    }
    let mut sum = vec![T::zero(); taps * c];
    for p in &partial {
        sum.iter_mut().zip(p).for_each(|(s, p)| *s += *p);
    }
    let dw: Vec<T> = (0..c * taps).map(|i| sum[(taps - 1 - i % taps) * c + i / taps]).collect();
    Ok((dx, Some(tensor(dw, (1, c * taps), T::DTYPE)?)))
}
