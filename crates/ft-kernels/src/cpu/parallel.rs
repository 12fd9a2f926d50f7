//! Parallel loops in a fixed order, and code compiled for AVX-512.

use rayon::prelude::*;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Rows per task of a row-wise kernel. Fixed, so that sums over rows have the same
/// order for any number of threads.
pub const ROWS: usize = 32;

/// Runs `f` compiled for AVX-512 if the CPU supports it and `f` is inlined. The
/// arithmetic and the bits stay the same.
#[inline]
pub fn vectorised<R>(f: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn widest<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        let here = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if here {
            // SAFETY: the check above found every target feature of `widest`.
            return unsafe { widest(f) };
        }
    }
    f()
}

/// Values per task of an elementwise pass.
const CHUNK: usize = 1 << 15;

/// Computes `len` values on all threads; `f` returns an iterator over the values of a range.
///
/// # Panics
/// If `f` yields too few values.
pub fn by_chunks<B: Send + Copy, I: Iterator<Item = B>>(
    len: usize,
    f: impl Fn(Range<usize>) -> I + Sync,
) -> Vec<B> {
    let mut out = Vec::with_capacity(len);
    let chunk = |(i, room): (usize, &mut [MaybeUninit<B>])| {
        let len = room.len();
        let written = vectorised(|| {
            let mut written = 0;
            for (to, x) in room.iter_mut().zip(f(i * CHUNK..i * CHUNK + len)) {
                to.write(x);
                written += 1;
            }
            written
        });
        assert_eq!(written, len, "values that are missing");
    };
    let room = &mut out.spare_capacity_mut()[..len];
    if len <= CHUNK {
        chunk((0, room))
    } else {
        room.par_chunks_mut(CHUNK).enumerate().for_each(chunk)
    }
    // SAFETY: each chunk asserts that it initialized all of its values, and the chunks cover `len` values.
    unsafe { out.set_len(len) };
    out
}
