//! Large blocks of memory straight from the system, with a bounded number of freed bytes kept for reuse.
//!
//! The C library's allocator keeps freed blocks of up to 32 MiB in its heaps, where a small block that stays pins the
//! free ones around it: how much depends on the order in which blocks came, and no plan can say it. Here each large
//! block has pages of its own. A block that is freed is kept for the next one of its size or below, as long as all
//! that is in use or kept stays within the run's plan and a stated share above it ([`keep_within`]); what is more goes
//! back to the system at once. So the process is as large as its plan at the most, and reuse costs no page faults.
//!
//! ```text
//! alloc     the smallest kept block that is large enough, cut to size;  else new pages
//! dealloc   kept, together with kept neighbours;  while too much is kept, the end of the oldest goes back
//! ```
//!
//! Small blocks are the C library's.

use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Blocks from this many bytes on are taken from the system.
pub const LARGE: usize = 128 << 10;
/// Bytes that are kept for reuse where no plan says how many, and where a run takes more than its plan.
const KEPT: [u64; 2] = [64 << 20, 1 << 20];
/// Kept blocks at the most.
const SLOTS: usize = 256;

/// Counted bytes of the process that used and kept ones stay within together.
static LIMIT: AtomicU64 = AtomicU64::new(0);
static PAGE: AtomicUsize = AtomicUsize::new(0);
static POOL: Mutex<Pool> = Mutex::new(Pool::new());

/// Lets freed blocks be kept as long as they and all counted bytes in use are at most `bytes` together.
pub fn keep_within(bytes: u64) {
    LIMIT.store(bytes, Relaxed);
}

/// Bytes that may be kept beside `live` counted ones in use.
fn room(live: u64) -> usize {
    let bytes = match LIMIT.load(Relaxed) {
        0 => KEPT[0],
        limit => limit.saturating_sub(live).max(KEPT[1]),
    };
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Bytes of a page.
fn page() -> usize {
    match PAGE.load(Relaxed) {
        0 => {
            // SAFETY: asks for a number.
            let n = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(4096);
            PAGE.store(n, Relaxed);
            n
        }
        n => n,
    }
}

/// Whole pages for so many bytes; `None` where there are no such numbers.
fn pages(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(page())
}

/// Kept pages.
#[derive(Clone, Copy)]
struct Block {
    start: usize,
    len: usize,
    /// When it was freed.
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
    /// Bytes of all kept blocks.
    kept: usize,
    clock: u64,
}

/// New zeroed pages, or null.
fn map(len: usize) -> *mut u8 {
    // SAFETY: a private mapping of no file at an address that the system chooses touches nothing that is there.
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

/// Gives pages back.
///
/// # Safety
/// They came from [`map`], and nothing points there any more.
unsafe fn unmap(start: usize, len: usize) {
    if len > 0 {
        // SAFETY: the caller's promise. It fails where the system has no room to split a mapping: the pages are lost
        // then, which harms nobody.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(start), len) };
    }
}

impl Pool {
    const fn new() -> Self {
        Self { blocks: [Block { start: 0, len: 0, age: 0 }; SLOTS], count: 0, kept: 0, clock: 0 }
    }

    fn lock() -> MutexGuard<'static, Pool> {
        // nothing in here panics half way
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

    /// The start of the smallest kept block of `len` bytes or more; what it has beyond stays kept.
    fn take(&mut self, len: usize) -> Option<usize> {
        let fitting = self.all().iter().enumerate().filter(|(_, b)| b.len >= len);
        let (at, found) = fitting.min_by_key(|(_, b)| b.len).map(|(at, b)| (at, *b))?;
        self.remove(at);
        let rest = Block { start: found.start + len, len: found.len - len, ..found };
        if rest.len >= LARGE {
            self.add(rest);
        } else {
            // no block is that small
            // SAFETY: kept pages are nobody's.
            unsafe { unmap(rest.start, rest.len) };
        }
        Some(found.start)
    }

    /// Keeps a freed block, joined with what is kept on either side of it.
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

    /// Gives back what is kept beyond `most` bytes, the oldest first.
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
            // SAFETY: kept pages are nobody's.
            unsafe { unmap(oldest.end() - over, over) };
        }
    }
}

/// A block of `bytes`, page-aligned; null where the system has none. `live` are the counted bytes in use.
pub fn alloc(bytes: usize, zeroed: bool, live: u64) -> *mut u8 {
    let Some(len) = pages(bytes) else { return ptr::null_mut() };
    let mut pool = Pool::lock();
    if let Some(start) = pool.take(len) {
        drop(pool);
        let p: *mut u8 = ptr::with_exposed_provenance_mut(start);
        if zeroed {
            // SAFETY: the block is `len` bytes of our own, and nobody else has it.
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

/// Takes a block back. `live` are the counted bytes in use without it.
///
/// # Safety
/// `p` is from [`alloc`] or [`realloc`] of so many `bytes`, and is not used any more.
pub unsafe fn dealloc(p: *mut u8, bytes: usize, live: u64) {
    let Some(len) = pages(bytes) else { return };
    let (start, room) = (p.expose_provenance(), room(live));
    if len > room {
        // SAFETY: the caller's promise.
        return unsafe { unmap(start, len) };
    }
    let mut pool = Pool::lock();
    pool.keep(start, len);
    pool.release(room);
}

/// Makes a block of `old` bytes one of `new`, both [`LARGE`] or more; null where the system has no more, and the block
/// stays as it is.
///
/// # Safety
/// As for [`dealloc`], of the block as it was.
pub unsafe fn realloc(p: *mut u8, old: usize, new: usize, live: u64) -> *mut u8 {
    let (Some(was), Some(len)) = (pages(old), pages(new)) else { return ptr::null_mut() };
    if len <= was {
        // SAFETY: the end of the block is not used any more.
        unsafe { unmap(p.expose_provenance() + len, was - len) };
        return p;
    }
    Pool::lock().release(room(live + (len - was) as u64));
    // SAFETY: the block is the caller's, who uses what comes back instead.
    let q = unsafe { libc::mremap(p.cast(), was, len, libc::MREMAP_MAYMOVE) };
    if q != libc::MAP_FAILED {
        let _ = q.expose_provenance();
        return q.cast();
    }
    // its pages may be of several mappings, which cannot move as one
    let q = alloc(new, false, live);
    if !q.is_null() {
        // SAFETY: both are at least `old` bytes, and are different blocks.
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

    /// A pool of its own, with pages that are really there.
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
        // cut from the front; the rest stays
        assert_eq!(pool.take(256 * K), Some(a));
        assert_eq!((pool.count, pool.kept), (1, 768 * K));
        assert_eq!(pool.take(1024 * K), None);
        // the smallest that is large enough
        let b = block(300 * K);
        pool.keep(b, 300 * K);
        assert_eq!(pool.take(280 * K), Some(b), "its rest is too small to keep");
        assert_eq!((pool.count, pool.kept), (1, 768 * K));
        // back where it was, it is whole again
        pool.keep(a, 256 * K);
        assert_eq!((pool.count, pool.kept, pool.take(1024 * K)), (1, 1024 * K, Some(a)));
        assert_eq!((pool.count, pool.kept), (0, 0));
    }

    #[test]
    fn the_oldest_goes_first_and_by_its_end() {
        let mut pool = Pool::new();
        let blocks: Vec<usize> = (0..3).map(|_| block(512 * K)).collect();
        for b in &blocks {
            // apart from one another, whatever the system placed side by side
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
    fn no_number_of_blocks_is_too_many() {
        let mut pool = Pool::new();
        for _ in 0..2 * SLOTS {
            let b = block(2 * LARGE);
            pool.keep(b, LARGE);
            assert!(pool.count <= SLOTS);
        }
        pool.release(0);
        assert_eq!((pool.count, pool.kept), (0, 0));
    }

    /// What is written stays through growing, shrinking and reuse; zeroed blocks are zero.
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
