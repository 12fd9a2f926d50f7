//! Threads of a product, and pointers that they share.

use std::cell::Cell;

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
