//! Parallel sums over ranks.

use ft_kernels::cpu::each;

/// Values summed per task.
const CHUNK: usize = 16 * 1024;

/// `to += x`.
pub(super) fn add(to: &mut [f32], x: &[f32]) {
    let both = to.chunks_mut(CHUNK).zip(x.chunks(CHUNK));
    each(both, |(to, x)| to.iter_mut().zip(x).for_each(|(to, x)| *to += x));
}

/// `to += x`, with `x` as bytes.
pub(super) fn add_bytes(to: &mut [f32], x: &[u8]) {
    let both = to.chunks_mut(CHUNK).zip(x.as_chunks().0.chunks(CHUNK));
    each(both, |(to, x)| to.iter_mut().zip(x).for_each(|(to, x)| *to += f32::from_ne_bytes(*x)));
}
