//! Memory that is in use: as the system counts it, and as this program's own allocations add up.

pub mod limits;
pub mod place;
#[cfg(target_os = "linux")]
mod pool;
#[cfg(not(target_os = "linux"))]
#[path = "no_pool.rs"]
mod pool;

use place::Phase;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Allocations below this many bytes are not counted: tensors are larger, and there are few of them.
pub const COUNTED: usize = 1 << 10;

static LIVE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);
static TOTAL: AtomicU64 = AtomicU64::new(0);
/// The peaks of phases that are over, in the order of [`Phase::ALL`].
static PHASES: [AtomicU64; Phase::ALL.len()] = [const { AtomicU64::new(0) }; Phase::ALL.len()];
/// What to do when an allocation fails, told its bytes; it does not come back.
static FAILED: OnceLock<fn(u64) -> !> = OnceLock::new();
static FAILING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether this thread is saying that an allocation failed.
    static SAYING: Cell<bool> = const { Cell::new(false) };
}

/// The system's allocator, counting allocations of [`COUNTED`] bytes and more; large blocks get pages of their own
/// (`pool`), so that what is held beyond them is known.
///
/// A binary that wants its peak in `metrics.jsonl` compared with the plan makes it the global allocator, as
/// `ft` does; a library that is used elsewhere does not, and the figures are then absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counting;

/// Ranks whose bytes are told apart, at the most.
const RANKS: usize = 64;

/// Counted bytes of a rank that is a thread of this process.
struct OfRank {
    live: AtomicI64,
    peak: AtomicI64,
}

static OF_RANKS: [OfRank; RANKS] =
    [const { OfRank { live: AtomicI64::new(0), peak: AtomicI64::new(0) } }; RANKS];

thread_local! {
    /// The rank that this thread computes for, where there are several.
    static RANK: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// From here on what this thread allocates is a rank's, and what it gives back is that rank's too.
pub fn count_for(rank: usize) {
    RANK.set(rank);
}

/// Forgets what ranks allocated: they are to begin anew.
pub fn forget_ranks() {
    for r in &OF_RANKS {
        r.live.store(0, Relaxed);
        r.peak.store(0, Relaxed);
    }
}

/// The most counted bytes that any of the ranks holds, and that it held at once, where ranks count.
pub fn of_ranks() -> (u64, u64) {
    let most = |of: fn(&OfRank) -> &AtomicI64| OF_RANKS.iter().map(|r| of(r).load(Relaxed)).max();
    let [live, peak] = [most(|r| &r.live), most(|r| &r.peak)].map(|n| n.unwrap_or(0).max(0) as u64);
    (live, peak)
}

fn count(bytes: i64) {
    if let Some(r) = OF_RANKS.get(RANK.get()) {
        let live = r.live.fetch_add(bytes, Relaxed) + bytes;
        r.peak.fetch_max(live, Relaxed);
    }
}

fn add(bytes: usize) {
    if bytes >= COUNTED {
        count(bytes as i64);
        let live = LIVE.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        PEAK.fetch_max(live, Relaxed);
        TOTAL.fetch_add(1, Relaxed);
    }
}

/// Sets what is done when the system has no memory for a large allocation, instead of ending the process without
/// a word. The first one set stays.
pub fn on_failure(f: fn(u64) -> !) {
    // a second run in one process says the same
    let _ = FAILED.set(f);
}

/// The system had no memory. What is called may allocate a little; where not even that is left, a few words that take
/// none are said instead. The first thread that fails ends the process, others wait for that.
#[cold]
fn failed(bytes: usize) {
    let Some(f) = FAILED.get() else { return };
    if SAYING.replace(true) {
        let _ = rustix::io::write(std::io::stderr(), b"error: out of memory\n");
        signal_hook::low_level::exit(crate::ExitCode::DoesNotFit as i32);
    }
    while FAILING.swap(true, Relaxed) {
        std::thread::sleep(Duration::from_secs(1));
    }
    f(bytes as u64)
}

fn sub(bytes: usize) {
    if bytes >= COUNTED {
        count(-(bytes as i64));
        LIVE.fetch_sub(bytes as u64, Relaxed);
    }
}

/// Whether a block gets pages of its own: by its layout alone, so that giving it back finds the same answer.
fn own_pages(layout: Layout) -> bool {
    cfg!(target_os = "linux") && layout.size() >= pool::LARGE && layout.align() <= 4096
}

impl Counting {
    /// A block by its layout that is counted, or zeroed; the caller's promise is [`GlobalAlloc::alloc`]'s. It is not a
    /// part of what serves small blocks, of which there are a million a second.
    #[inline(never)]
    unsafe fn block(layout: Layout, zeroed: bool) -> *mut u8 {
        let p = match (own_pages(layout), zeroed) {
            (true, _) => pool::alloc(layout.size(), zeroed, LIVE.load(Relaxed)),
            // SAFETY: the caller's promise about `layout` is passed on.
            (_, false) => unsafe { System.alloc(layout) },
            // SAFETY: as above.
            (_, true) => unsafe { System.alloc_zeroed(layout) },
        };
        match p.is_null() {
            true => failed(layout.size()),
            false => add(layout.size()),
        }
        p
    }

    /// Gives a counted block back; the caller's promise is [`GlobalAlloc::dealloc`]'s.
    #[inline(never)]
    unsafe fn give_back(p: *mut u8, layout: Layout) {
        sub(layout.size());
        match own_pages(layout) {
            // SAFETY: `p` came from this allocator with this layout, and so from the pool.
            true => unsafe { pool::dealloc(p, layout.size(), LIVE.load(Relaxed)) },
            // SAFETY: as above, from `System`.
            false => unsafe { System.dealloc(p, layout) },
        }
    }
}

// SAFETY: every call goes to `System` or to the pool of large blocks, by the layout it came with, and back to where
// the block came from; counting touches atomics alone and allocates nothing. What is done after a failure ends the
// process.
unsafe impl GlobalAlloc for Counting {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= COUNTED {
            // SAFETY: the caller's promise is passed on.
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
        // SAFETY: as above. New pages come zeroed and untouched from the system, and cost nothing until used.
        unsafe { Self::block(layout, true) }
    }

    #[inline]
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        if layout.size() >= COUNTED {
            // SAFETY: the caller's promise is passed on.
            return unsafe { Self::give_back(p, layout) };
        }
        // SAFETY: `p` came from this allocator with this layout, and so from `System`.
        unsafe { System.dealloc(p, layout) };
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if layout.size() < COUNTED && size < COUNTED {
            // SAFETY: `p` came from `System` with this layout; the caller promises a `size` above 0.
            let new = unsafe { System.realloc(p, layout, size) };
            if new.is_null() {
                failed(size);
            }
            return new;
        }
        // SAFETY: the caller promises a `size` that makes a layout.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        let new = match (own_pages(layout), own_pages(wanted)) {
            // SAFETY: as for `dealloc`; the caller promises a `size` above 0.
            (false, false) => unsafe { System.realloc(p, layout, size) },
            // SAFETY: as for `dealloc`.
            (true, true) => unsafe { pool::realloc(p, layout.size(), size, LIVE.load(Relaxed)) },
            _ => {
                // SAFETY: the new block is another one, and both hold the smaller number of bytes.
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

/// Lets the allocator keep freed large blocks for reuse as long as all that is counted stays within `bytes`: what a
/// run plans for itself beyond what is counted now.
pub fn keep_within(bytes: u64) {
    pool::keep_within(bytes.saturating_add(LIVE.load(Relaxed)));
}

/// Bytes of counted allocations that are live; `None` when this binary does not count.
pub fn live_bytes() -> Option<u64> {
    (TOTAL.load(Relaxed) > 0).then(|| LIVE.load(Relaxed))
}

/// Largest number of counted bytes that were live at once since the last [`reset_peak`].
pub fn peak_bytes() -> Option<u64> {
    let phases = PHASES.iter().map(|p| p.load(Relaxed)).max().unwrap_or(0);
    (TOTAL.load(Relaxed) > 0).then(|| PEAK.load(Relaxed).max(phases))
}

/// The peak of each phase since the last [`reset_peak`], in the order of [`Phase::ALL`]; 0 where none was.
pub fn phase_peaks() -> [u64; Phase::ALL.len()] {
    let mut peaks = std::array::from_fn(|p| PHASES[p].load(Relaxed));
    let (now, _) = place::everybody();
    peaks[now as usize] = peaks[now as usize].max(PEAK.load(Relaxed));
    peaks
}

/// Ends a phase: the next one's peak begins with what is live now.
pub(super) fn close(phase: usize) {
    if let Some(p) = PHASES.get(phase) {
        p.fetch_max(PEAK.load(Relaxed), Relaxed);
        PEAK.store(LIVE.load(Relaxed), Relaxed);
    }
}

/// Lets the peak start again from what is live now.
pub fn reset_peak() {
    PHASES.iter().for_each(|p| p.store(0, Relaxed));
    PEAK.store(LIVE.load(Relaxed), Relaxed);
}

/// Largest resident size of this process so far, in bytes; 0 where the system does not tell.
pub fn peak_host_bytes() -> u64 {
    field("/proc/self/status", "VmHWM:").unwrap_or(0)
}

/// Resident size of this process, in bytes.
pub fn host_bytes() -> u64 {
    field("/proc/self/status", "VmRSS:").unwrap_or(0)
}

/// Processes of this run that share the machine's memory evenly.
static SHARING: AtomicU64 = AtomicU64::new(1);

/// From here on what the machine has is shared by so many processes, of which this is one.
pub fn share_among(processes: u64) {
    SHARING.store(processes.max(1), Relaxed);
}

/// Bytes that new work may take without swapping: what the system has available, within the limits of control
/// groups and of this process; of several processes of a run, this one's part of it. `None` where nothing is told.
pub fn available_bytes() -> Option<u64> {
    limits::available(Path::new("/")).map(part)
}

/// This process's part of what the machine has for all processes of the run.
pub fn part(bytes: u64) -> u64 {
    bytes / SHARING.load(Relaxed)
}

/// Bytes that this process may hold in all: [`available_bytes`], and what it holds already.
pub fn reach_bytes() -> Option<u64> {
    let root = Path::new("/");
    limits::available(root).map(|free| part(free) + limits::own(root).unwrap_or(0))
}

/// Whether the limit on addresses (`ulimit -v`) leaves a new thread its stack and what the system maps beside it, for
/// which there is no error to return: a thread that starts without it ends the process.
///
/// # Errors
/// It does not.
pub fn room_for_thread(stack: usize) -> std::io::Result<()> {
    const BESIDE: u64 = 1 << 20;
    match limits::addresses(Path::new("/")) {
        Some(left) if left < stack as u64 + BESIDE => {
            Err(std::io::Error::other(format!("the limit on addresses leaves {left} bytes")))
        }
        _ => Ok(()),
    }
}

/// A line "KEY  N kB" of a file of the system, in bytes.
fn field(file: &str, key: &str) -> Option<u64> {
    limits::field(Path::new(file), key)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_process_has_a_size() {
        let (now, peak) = (super::host_bytes(), super::peak_host_bytes());
        assert!(now > 1 << 20 && peak >= now, "{now} {peak}");
        assert!(super::available_bytes().is_some_and(|b| b > 1 << 20));
    }

    #[test]
    fn large_allocations_are_counted() {
        let big = vec![1u8; 64 << 20];
        // other tests allocate too, but not this much
        assert!(super::live_bytes().is_some_and(|b| b >= 64 << 20), "{:?}", super::live_bytes());
        assert!(super::peak_bytes() >= super::live_bytes());
        drop(big);
    }
}
