//! Parallel sums over ranks.

use rayon::prelude::*;

/// Values summed per task.
const CHUNK: usize = 16 * 1024;

/// `to += x`.
pub(super) fn add(to: &mut [f32], x: &[f32]) {
    let both = to.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK));
    both.for_each(|(to, x)| to.iter_mut().zip(x).for_each(|(to, x)| *to += x));
}

/// `to += x`, with `x` as bytes.
pub(super) fn add_bytes(to: &mut [f32], x: &[u8]) {
    let both = to.par_chunks_mut(CHUNK).zip(x.as_chunks().0.par_chunks(CHUNK));
    both.for_each(|(to, x)| to.iter_mut().zip(x).for_each(|(to, x)| *to += f32::from_ne_bytes(*x)));
}
