//! The global allocator: counts large allocations and serves the largest from a pool.

use super::counts::{COUNTED, add, live, sub};
use super::pool;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Handler for a failed allocation; receives the requested bytes and ends the process.
static FAILED: OnceLock<fn(u64) -> !> = OnceLock::new();
static FAILING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether this thread is running the failure handler.
    static REPORTING: Cell<bool> = const { Cell::new(false) };
}

/// The system allocator with a count of live bytes in allocations of [`COUNTED`] bytes and more. Large
/// blocks get their own pages (module `pool`), which bounds allocator overhead.
///
/// A binary installs it as the global allocator, as `ft` does, to compare the measured peak in
/// `metrics.jsonl` with the plan. Without it these figures are absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

/// Sets the handler for a failed large allocation, in place of a silent abort. Only the first call has
/// an effect.
pub fn on_failure(f: fn(u64) -> !) {
    // A second run in the same process sets the same handler.
    let _ = FAILED.set(f);
}

/// Handles a failed allocation. The handler may allocate small blocks; if one of them fails too, a fixed
/// message is printed without any allocation. The first thread to fail ends the process, and further
/// failing threads wait.
#[cold]
fn failed(bytes: usize) {
    let Some(f) = FAILED.get() else { return };
    if REPORTING.replace(true) {
        let _ = rustix::io::write(std::io::stderr(), b"error: out of memory\n");
        signal_hook::low_level::exit(crate::ExitCode::DoesNotFit as i32);
    }
    while FAILING.swap(true, Relaxed) {
        std::thread::sleep(Duration::from_secs(1));
    }
    f(bytes as u64)
}

/// Whether a block gets its own pages. Depends on the layout alone, so `dealloc` reaches the same
/// decision as `alloc`.
fn own_pages(layout: Layout) -> bool {
    cfg!(target_os = "linux") && layout.size() >= pool::LARGE && layout.align() <= 4096
}

impl CountingAllocator {
    /// Allocates a counted or zeroed block. Out of line, to keep the path of small blocks short, about
    /// a million per second.
    ///
    /// # Safety
    /// As for [`GlobalAlloc::alloc`].
    #[inline(never)]
    unsafe fn block(layout: Layout, zeroed: bool) -> *mut u8 {
        let p = match (own_pages(layout), zeroed) {
            (true, _) => pool::alloc(layout.size(), zeroed, live()),
            // SAFETY: the caller upholds the contract of `alloc` for `layout`.
            (_, false) => unsafe { System.alloc(layout) },
            // SAFETY: as above.
            (_, true) => unsafe { System.alloc_zeroed(layout) },
        };
        if p.is_null() {
            failed(layout.size());
        } else {
            add(layout.size());
        }
        p
    }

    /// Frees a counted block.
    ///
    /// # Safety
    /// As for [`GlobalAlloc::dealloc`].
    #[inline(never)]
    unsafe fn give_back(p: *mut u8, layout: Layout) {
        sub(layout.size());
        match own_pages(layout) {
            // SAFETY: `p` was allocated with this layout, hence by the pool: `own_pages` depends on the
            // layout alone.
            true => unsafe { pool::dealloc(p, layout.size(), live()) },
            // SAFETY: as above, but by `System`.
            false => unsafe { System.dealloc(p, layout) },
        }
    }
}

// SAFETY: every allocation is served by `System` or by the pool, chosen by layout alone, so `dealloc`
// and `realloc` return a block to the allocator it came from. CountingAllocator uses atomics and does not
// allocate. The failure handler, if set, does not return.
unsafe impl GlobalAlloc for CountingAllocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= COUNTED {
            // SAFETY: the caller upholds the contract of `alloc`.
            return unsafe { Self::block(layout, false) };
        }
        // SAFETY: as above.
        let p = unsafe { System.alloc(layout) };
        if p.is_null() {
            failed(layout.size());
        }
        p
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above. New pages are zeroed by the system and cost nothing until touched.
        unsafe { Self::block(layout, true) }
    }

    #[inline]
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        if layout.size() >= COUNTED {
            // SAFETY: the caller upholds the contract of `dealloc`.
            return unsafe { Self::give_back(p, layout) };
        }
        // SAFETY: `p` was allocated with this layout, below `COUNTED` bytes, hence by `System`.
        unsafe { System.dealloc(p, layout) };
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if layout.size() < COUNTED && size < COUNTED {
            // SAFETY: `p` was allocated by `System` with this layout; the caller guarantees `size > 0`.
            let new = unsafe { System.realloc(p, layout, size) };
            if new.is_null() {
                failed(size);
            }
            return new;
        }
        // SAFETY: the caller guarantees that `size`, rounded up to the alignment, fits in `isize`.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        let new = match (own_pages(layout), own_pages(wanted)) {
            // SAFETY: `p` was allocated by `System` with this layout; the caller guarantees `size > 0`.
            (false, false) => unsafe { System.realloc(p, layout, size) },
            // SAFETY: `p` was allocated by the pool with `layout.size()` bytes.
            (true, true) => unsafe { pool::realloc(p, layout.size(), size, live()) },
            _ => {
                // SAFETY: `new` is a different block, and both blocks hold at least `min(layout.size(),
                // size)` bytes.
                return unsafe {
                    let new = self.alloc(wanted);
                    if !new.is_null() {
                        std::ptr::copy_nonoverlapping(p, new, layout.size().min(size));
                        self.dealloc(p, layout);
                    }
                    new
                };
            }
        };
        if new.is_null() {
            failed(size);
        } else {
            sub(layout.size());
            add(size);
        }
        new
    }
}

/// Sets the pool's limit to the bytes in use now plus `bytes`, the planned memory of the run. Freed large
/// blocks are retained while bytes in use plus retained bytes stay within it.
pub fn keep_within(bytes: u64) {
    pool::keep_within(bytes.saturating_add(live()));
}
