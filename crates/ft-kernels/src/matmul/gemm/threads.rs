//! Strips of a product, processed by threads dynamically.

use crate::cpu::on_threads;
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    static SERIAL: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` with single-threaded products, for callers that parallelize over independent products.
/// Results are bit-identical.
pub fn serial<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            SERIAL.set(self.0);
        }
    }
    let _restore = Restore(SERIAL.replace(true));
    f()
}

/// Whether products called from this thread are single-threaded.
pub fn is_serial() -> bool {
    SERIAL.get()
}

/// Number of threads for a product called from this thread.
pub fn threads() -> usize {
    if is_serial() { 1 } else { rayon::current_num_threads() }
}

/// Runs `f` for all indices below `count` on up to `threads` threads, each with its own result of `start`.
pub(super) fn each<S>(
    threads: usize,
    count: usize,
    start: impl Fn() -> S + Sync,
    f: impl Fn(&mut S, usize) + Sync,
) {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut state = start();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return;
            }
            f(&mut state, i);
        }
    };
    on_threads(threads.min(count), &work);
}

/// Pointer to a destination or buffer, shared by threads accessing disjoint parts.
#[derive(Clone, Copy)]
pub(super) struct Shared<T>(*mut T);

// SAFETY: the products of this folder give threads disjoint panels, strips and columns.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    pub(super) fn new(at: *mut T) -> Self {
        Self(at)
    }

    /// Pointer to value `i`; dereferencing it requires `i` to be in bounds.
    pub(super) fn at(self, i: usize) -> *mut T {
        self.0.wrapping_add(i)
    }
}
