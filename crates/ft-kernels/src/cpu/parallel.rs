//! Parallel loops in a fixed order, and code compiled for AVX-512.

use rayon::prelude::*;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Mutex;

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

/// Calls `work` on up to `threads` threads at once.
///
/// A parallel iterator of rayon is compiled for each closure, to 2,000 lines of intermediate code; this one once.
fn on_threads(threads: usize, work: &(dyn Fn() + Sync)) {
    match threads {
        0 => {}
        1 => work(),
        n => (0..n).into_par_iter().with_max_len(1).for_each(|_| work()),
    }
}

/// Calls `f` with each item on all threads. A free thread takes the next item, under a lock: an item is at least some
/// microseconds of work.
pub fn each<T>(items: impl ExactSizeIterator<Item = T> + Send, f: impl Fn(T) + Sync) {
    each_with(items, || (), |(), item| f(item));
}

/// [`each`] with per-thread state, initialized by `start`.
pub fn each_with<T, S>(
    items: impl ExactSizeIterator<Item = T> + Send,
    start: impl Fn() -> S + Sync,
    f: impl Fn(&mut S, T) + Sync,
) {
    each_on(rayon::current_num_threads(), items, start, f);
}

/// [`each_with`] on up to `threads` threads.
pub fn each_on<T, S>(
    threads: usize,
    items: impl ExactSizeIterator<Item = T> + Send,
    start: impl Fn() -> S + Sync,
    f: impl Fn(&mut S, T) + Sync,
) {
    let threads = threads.min(items.len());
    let items = Mutex::new(items);
    let next = || items.lock().ok().and_then(|mut items| items.next());
    on_threads(threads, &|| {
        let mut own = start();
        while let Some(item) = next() {
            f(&mut own, item);
        }
    });
}

/// Results of `f` for each item, in order, computed as by [`each`].
///
/// # Panics
/// If `f` does.
pub fn map<T, R: Send>(items: impl ExactSizeIterator<Item = T> + Send, f: impl Fn(T) -> R + Sync) -> Vec<R> {
    map_with(items, || (), |(), item| f(item))
}

/// As [`map`], with a value of `start` for each thread.
///
/// # Panics
/// If `f` does.
pub fn map_with<T, S, R: Send>(
    items: impl ExactSizeIterator<Item = T> + Send,
    start: impl Fn() -> S + Sync,
    f: impl Fn(&mut S, T) -> R + Sync,
) -> Vec<R> {
    let mut results: Vec<Option<R>> = (0..items.len()).map(|_| None).collect();
    each_with(results.iter_mut().zip(items), start, |own, (result, item)| *result = Some(f(own, item)));
    results.into_iter().map(|result| result.expect("each item has a result")).collect()
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
        each(room.chunks_mut(CHUNK).enumerate(), chunk)
    }
    // SAFETY: the chunks cover `len` values, and every chunk asserts the initialization of all its values.
    unsafe { out.set_len(len) };
    out
}
