//! Page-granular pool for large blocks, with a bound on the freed bytes retained for reuse.
//!
//! The C library's allocator keeps freed blocks of up to 32 MiB in heaps, where one small live block
//! pins the free memory around it. The overhead depends on the order of allocations, so no plan can
//! predict it. Large blocks therefore get pages of their own. A freed block is retained for a later allocation
//! of the same size or less while bytes in use plus retained bytes stay within the planned memory
//! ([`keep_within`]); any excess returns to the system at once. Retained blocks thus exceed the plan by at
//! most 1 MiB, and reuse causes no page faults.
//!
//! ```text
//! alloc     the smallest retained block that fits, cut to size;  else new pages
//! dealloc   retained, merged with neighbors;  above the limit, the oldest are unmapped, from the end
//! ```
//!
//! Small blocks use the C library.

use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Blocks of at least this many bytes are pooled.
pub const LARGE: usize = 128 << 10;
/// Retained bytes allowed without a plan, and the minimum allowed when a run exceeds the plan.
const KEPT: [u64; 2] = [64 << 20, 1 << 20];
/// Maximum number of retained blocks.
const SLOTS: usize = 256;

/// Limit on counted bytes in use plus retained bytes; 0 without a plan.
static LIMIT: AtomicU64 = AtomicU64::new(0);
static PAGE: AtomicUsize = AtomicUsize::new(0);
static POOL: Mutex<Pool> = Mutex::new(Pool::new());

/// Retains freed blocks while counted bytes in use plus retained bytes are at most `bytes`.
pub fn keep_within(bytes: u64) {
    LIMIT.store(bytes, Relaxed);
}

/// Bytes that may be retained while `live` counted bytes are in use.
fn room(live: u64) -> usize {
    let bytes = match LIMIT.load(Relaxed) {
        0 => KEPT[0],
        limit => limit.saturating_sub(live).max(KEPT[1]),
    };
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Page size in bytes.
fn page() -> usize {
    match PAGE.load(Relaxed) {
        0 => {
            // SAFETY: `sysconf` has no preconditions and returns a number.
            let n = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(4096);
            PAGE.store(n, Relaxed);
            n
        }
        n => n,
    }
}

/// Rounds up to whole pages; `None` on overflow.
fn pages(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(page())
}

/// A retained run of pages.
#[derive(Clone, Copy)]
struct Block {
    start: usize,
    len: usize,
    /// Value of [`Pool::clock`] when the block was freed.
    age: u64,
}

impl Block {
    fn end(&self) -> usize {
        self.start + self.len
    }
}

struct Pool {
    blocks: [Block; SLOTS],
    count: usize,
    /// Total bytes of retained blocks.
    kept: usize,
    clock: u64,
}

/// Maps new zeroed pages; null on failure.
fn map(len: usize) -> *mut u8 {
    // SAFETY: a private anonymous mapping at an address chosen by the system does not affect existing
    // mappings.
    let p = unsafe {
        libc::mmap(
            ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if p == libc::MAP_FAILED { ptr::null_mut() } else { p.cast() }
}

/// Unmaps pages.
///
/// # Safety
/// The pages came from [`map`], and nothing refers to them any more.
unsafe fn unmap(start: usize, len: usize) {
    if len > 0 {
        // SAFETY: by the caller's contract. `munmap` fails if the system cannot split a mapping; the
        // pages then leak, which is harmless.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(start), len) };
    }
}

impl Pool {
    const fn new() -> Self {
        Self { blocks: [Block { start: 0, len: 0, age: 0 }; SLOTS], count: 0, kept: 0, clock: 0 }
    }

    fn lock() -> MutexGuard<'static, Pool> {
        // No operation on the pool panics halfway, so a poisoned pool is consistent.
        POOL.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> &[Block] {
        &self.blocks[..self.count]
    }

    fn remove(&mut self, at: usize) -> Block {
        let block = self.blocks[at];
        self.count -= 1;
        self.blocks[at] = self.blocks[self.count];
        self.kept -= block.len;
        block
    }

    fn add(&mut self, block: Block) {
        self.blocks[self.count] = block;
        self.count += 1;
        self.kept += block.len;
    }

    /// Removes the smallest retained block of at least `len` bytes and returns the start address. The
    /// remainder stays retained if it is at least [`LARGE`] bytes.
    fn take(&mut self, len: usize) -> Option<usize> {
        let fitting = self.all().iter().enumerate().filter(|(_, b)| b.len >= len);
        let (at, found) = fitting.min_by_key(|(_, b)| b.len).map(|(at, b)| (at, *b))?;
        self.remove(at);
        let rest = Block { start: found.start + len, len: found.len - len, ..found };
        if rest.len >= LARGE {
            self.add(rest);
        } else {
            // Too small to serve any allocation.
            // SAFETY: retained pages are not in use.
            unsafe { unmap(rest.start, rest.len) };
        }
        Some(found.start)
    }

    /// Retains a freed block, merged with adjacent retained blocks.
    fn keep(&mut self, start: usize, len: usize) {
        self.clock += 1;
        let mut block = Block { start, len, age: self.clock };
        let mut at = 0;
        while at < self.count {
            let other = self.blocks[at];
            if other.end() == block.start || block.end() == other.start {
                self.remove(at);
                block = Block { start: block.start.min(other.start), len: block.len + other.len, ..block };
            } else {
                at += 1;
            }
        }
        if self.count == SLOTS {
            self.release(self.kept.saturating_sub(1));
        }
        self.add(block);
    }

    /// Unmaps retained pages beyond `most` bytes, oldest blocks first.
    fn release(&mut self, most: usize) {
        while self.kept > most {
            let Some((at, oldest)) = self.all().iter().enumerate().min_by_key(|(_, b)| b.age) else { return };
            let oldest = *oldest;
            let mut over = pages(self.kept - most).unwrap_or(usize::MAX).min(oldest.len);
            if self.count == SLOTS || oldest.len - over < LARGE {
                over = oldest.len;
            }
            if over == oldest.len {
                self.remove(at);
            } else {
                self.blocks[at].len -= over;
                self.kept -= over;
            }
            // SAFETY: retained pages are not in use.
            unsafe { unmap(oldest.end() - over, over) };
        }
    }
}

/// Allocates a page-aligned block of `bytes`; null if the system is out of memory. `live` is the number
/// of counted bytes in use.
pub fn alloc(bytes: usize, zeroed: bool, live: u64) -> *mut u8 {
    let Some(len) = pages(bytes) else { return ptr::null_mut() };
    let mut pool = Pool::lock();
    if let Some(start) = pool.take(len) {
        drop(pool);
        let p: *mut u8 = ptr::with_exposed_provenance_mut(start);
        if zeroed {
            // SAFETY: the block of `len >= bytes` bytes was just removed from the pool and has no other
            // owner.
            unsafe { ptr::write_bytes(p, 0, bytes) };
        }
        return p;
    }
    pool.release(room(live + len as u64));
    let mut p = map(len);
    if p.is_null() {
        pool.release(0);
        p = map(len);
    }
    drop(pool);
    let _ = p.expose_provenance();
    p
}

/// Frees a block. `live` is the number of counted bytes in use without this block.
///
/// # Safety
/// `p` is from [`alloc`] or [`realloc`] with the same `bytes`, and is not used any more.
pub unsafe fn dealloc(p: *mut u8, bytes: usize, live: u64) {
    let Some(len) = pages(bytes) else { return };
    let (start, room) = (p.expose_provenance(), room(live));
    if len > room {
        // SAFETY: by the caller's contract.
        return unsafe { unmap(start, len) };
    }
    let mut pool = Pool::lock();
    pool.keep(start, len);
    pool.release(room);
}

/// Resizes a block from `old` to `new` bytes, both at least [`LARGE`]. Returns null if the system is out
/// of memory, and leaves the block unchanged.
///
/// # Safety
/// As for [`dealloc`], with `old` bytes.
pub unsafe fn realloc(p: *mut u8, old: usize, new: usize, live: u64) -> *mut u8 {
    let (Some(was), Some(len)) = (pages(old), pages(new)) else { return ptr::null_mut() };
    if len <= was {
        // SAFETY: the pages after `len` belong to the block and are no longer used.
        unsafe { unmap(p.expose_provenance() + len, was - len) };
        return p;
    }
    Pool::lock().release(room(live + (len - was) as u64));
    // SAFETY: the caller owns the block and uses the returned pointer from now on.
    let q = unsafe { libc::mremap(p.cast(), was, len, libc::MREMAP_MAYMOVE) };
    if q != libc::MAP_FAILED {
        let _ = q.expose_provenance();
        return q.cast();
    }
    // A merged block may span several mappings, which `mremap` cannot move together.
    let q = alloc(new, false, live);
    if !q.is_null() {
        // SAFETY: the blocks are distinct, and both hold at least `old` bytes.
        unsafe {
            ptr::copy_nonoverlapping(p, q, old);
            dealloc(p, old, live);
        }
    }
    q
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Maps fresh pages for a test.
    fn block(len: usize) -> usize {
        let p = map(len);
        assert!(!p.is_null());
        p.expose_provenance()
    }

    const K: usize = 1 << 10;

    #[test]
    fn freed_blocks_are_cut_and_joined() {
        let mut pool = Pool::new();
        let a = block(1024 * K);
        pool.keep(a, 1024 * K);
        // Cut from the front; the rest stays retained.
        assert_eq!(pool.take(256 * K), Some(a));
        assert_eq!((pool.count, pool.kept), (1, 768 * K));
        assert_eq!(pool.take(1024 * K), None);
        // The smallest block that fits is taken.
        let b = block(300 * K);
        pool.keep(b, 300 * K);
        assert_eq!(pool.take(280 * K), Some(b), "its rest is too small to keep");
        assert_eq!((pool.count, pool.kept), (1, 768 * K));
        // After the front is returned, the block is whole again.
        pool.keep(a, 256 * K);
        assert_eq!((pool.count, pool.kept, pool.take(1024 * K)), (1, 1024 * K, Some(a)));
        assert_eq!((pool.count, pool.kept), (0, 0));
    }

    #[test]
    fn the_oldest_block_is_released_first_from_its_end() {
        let mut pool = Pool::new();
        let blocks: Vec<usize> = (0..3).map(|_| block(512 * K)).collect();
        for b in &blocks {
            // Leaves gaps, so that blocks do not merge even if the system places them side by side.
            pool.keep(*b, 384 * K);
        }
        pool.release(1024 * K);
        assert_eq!(pool.kept, 1024 * K);
        pool.release(800 * K);
        assert!(pool.kept <= 800 * K && pool.all().iter().any(|b| b.start == blocks[2]));
        pool.release(0);
        assert_eq!((pool.count, pool.kept), (0, 0));
    }

    #[test]
    fn blocks_beyond_the_slots_are_released() {
        let mut pool = Pool::new();
        for _ in 0..2 * SLOTS {
            let b = block(2 * LARGE);
            pool.keep(b, LARGE);
            assert!(pool.count <= SLOTS);
        }
        pool.release(0);
        assert_eq!((pool.count, pool.kept), (0, 0));
    }

    /// Contents survive growing, shrinking and reuse; zeroed blocks are zero.
    #[test]
    fn blocks_hold_what_is_written() {
        for round in 0..50usize {
            let mut v = vec![round as u8; LARGE + round * 1000];
            for _ in 0..4 {
                v.extend_from_within(..);
            }
            assert!(v.iter().all(|x| *x == round as u8));
            v.truncate(LARGE + 7);
            v.shrink_to_fit();
            assert!(v.len() == LARGE + 7 && v.iter().all(|x| *x == round as u8));
            drop(v);
            let zeros = vec![0u8; 3 * LARGE + round * 512];
            assert!(zeros.iter().all(|x| *x == 0));
        }
    }

    #[test]
    fn threads_do_not_share_a_block() {
        std::thread::scope(|s| {
            for t in 0..8u8 {
                s.spawn(move || {
                    for n in 0..200 {
                        let v = vec![t; LARGE + n * 4096 * usize::from(t)];
                        std::thread::yield_now();
                        assert!(v.iter().all(|x| *x == t));
                    }
                });
            }
        });
    }
}
