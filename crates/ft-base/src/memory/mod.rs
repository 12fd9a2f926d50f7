//! Memory in use: resident size from the system, and allocated bytes counted by the global allocator.

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

/// Allocations below this size (bytes) are not counted. Tensors are larger, and few enough to count.
pub const COUNTED: usize = 1 << 10;

static LIVE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);
static TOTAL: AtomicU64 = AtomicU64::new(0);
/// Peaks of completed phases, in the order of [`Phase::ALL`].
static PHASES: [AtomicU64; Phase::ALL.len()] = [const { AtomicU64::new(0) }; Phase::ALL.len()];
/// Handler for a failed allocation; receives the requested bytes and ends the process.
static FAILED: OnceLock<fn(u64) -> !> = OnceLock::new();
static FAILING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether this thread is running the failure handler.
    static SAYING: Cell<bool> = const { Cell::new(false) };
}

/// The system allocator with a count of live bytes in allocations of [`COUNTED`] bytes and more. Large
/// blocks get their own pages (module `pool`), which bounds allocator overhead.
///
/// A binary installs it as the global allocator, as `ft` does, to compare the measured peak in
/// `metrics.jsonl` with the plan. Without it these figures are absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counting;

/// Maximum number of ranks with separate counts.
const RANKS: usize = 64;

/// Counted bytes of one rank, when ranks are threads of this process.
struct OfRank {
    live: AtomicI64,
    peak: AtomicI64,
}

static OF_RANKS: [OfRank; RANKS] =
    [const { OfRank { live: AtomicI64::new(0), peak: AtomicI64::new(0) } }; RANKS];

thread_local! {
    /// Rank of this thread; `usize::MAX` outside of a multi-rank run.
    static RANK: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Attributes all later allocations and deallocations of this thread to `rank`.
pub fn count_for(rank: usize) {
    RANK.set(rank);
}

/// Resets the counts of all ranks, before ranks start again.
pub fn forget_ranks() {
    for r in &OF_RANKS {
        r.live.store(0, Relaxed);
        r.peak.store(0, Relaxed);
    }
}

/// Maximum over ranks of live bytes, and of peak bytes; zeros without multiple ranks.
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

/// Whether a block gets its own pages. Depends on the layout alone, so `dealloc` reaches the same
/// decision as `alloc`.
fn own_pages(layout: Layout) -> bool {
    cfg!(target_os = "linux") && layout.size() >= pool::LARGE && layout.align() <= 4096
}

impl Counting {
    /// Allocates a counted or zeroed block. Out of line, to keep the path of small blocks short: there
    /// are about a million of them per second.
    ///
    /// # Safety
    /// As for [`GlobalAlloc::alloc`].
    #[inline(never)]
    unsafe fn block(layout: Layout, zeroed: bool) -> *mut u8 {
        let p = match (own_pages(layout), zeroed) {
            (true, _) => pool::alloc(layout.size(), zeroed, LIVE.load(Relaxed)),
            // SAFETY: the caller upholds the contract of `alloc` for `layout`.
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
            true => unsafe { pool::dealloc(p, layout.size(), LIVE.load(Relaxed)) },
            // SAFETY: as above, but by `System`.
            false => unsafe { System.dealloc(p, layout) },
        }
    }
}

// SAFETY: every allocation is served by `System` or by the pool, chosen by layout alone, so `dealloc`
// and `realloc` return a block to the allocator it came from. Counting uses atomics and does not
// allocate. The failure handler, if set, does not return.
unsafe impl GlobalAlloc for Counting {
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
            (true, true) => unsafe { pool::realloc(p, layout.size(), size, LIVE.load(Relaxed)) },
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

/// Lets the pool retain freed large blocks while counted bytes in use plus retained bytes stay within
/// the current count plus `bytes`, the planned memory of the run.
pub fn keep_within(bytes: u64) {
    pool::keep_within(bytes.saturating_add(LIVE.load(Relaxed)));
}

/// Live counted bytes; `None` if this binary does not count.
pub fn live_bytes() -> Option<u64> {
    (TOTAL.load(Relaxed) > 0).then(|| LIVE.load(Relaxed))
}

/// Peak of live counted bytes since the last [`reset_peak`].
pub fn peak_bytes() -> Option<u64> {
    let phases = PHASES.iter().map(|p| p.load(Relaxed)).max().unwrap_or(0);
    (TOTAL.load(Relaxed) > 0).then(|| PEAK.load(Relaxed).max(phases))
}

/// Peak per phase since the last [`reset_peak`], in the order of [`Phase::ALL`]; 0 for phases not entered.
pub fn phase_peaks() -> [u64; Phase::ALL.len()] {
    let mut peaks = std::array::from_fn(|p| PHASES[p].load(Relaxed));
    let (now, _) = place::everybody();
    peaks[now as usize] = peaks[now as usize].max(PEAK.load(Relaxed));
    peaks
}

/// Ends a phase. The peak of the next one starts at the bytes live now.
pub(super) fn close(phase: usize) {
    if let Some(p) = PHASES.get(phase) {
        p.fetch_max(PEAK.load(Relaxed), Relaxed);
        PEAK.store(LIVE.load(Relaxed), Relaxed);
    }
}

/// Restarts all peaks at the bytes live now.
pub fn reset_peak() {
    PHASES.iter().for_each(|p| p.store(0, Relaxed));
    PEAK.store(LIVE.load(Relaxed), Relaxed);
}

/// Peak resident size of this process in bytes; 0 if unknown.
pub fn peak_host_bytes() -> u64 {
    field("/proc/self/status", "VmHWM:").unwrap_or(0)
}

/// Resident size of this process in bytes; 0 if unknown.
pub fn host_bytes() -> u64 {
    field("/proc/self/status", "VmRSS:").unwrap_or(0)
}

/// Number of processes of this run with an equal share of the machine's memory.
static SHARING: AtomicU64 = AtomicU64::new(1);

/// Divides the machine's memory evenly among this many processes, including this one.
pub fn share_among(processes: u64) {
    SHARING.store(processes.max(1), Relaxed);
}

/// Bytes available to new work without swapping, within control group and process limits. With several
/// processes per machine, this process's share. `None` if unknown.
pub fn available_bytes() -> Option<u64> {
    limits::available(Path::new("/")).map(part)
}

/// This process's share of bytes available to all processes of the run.
pub fn part(bytes: u64) -> u64 {
    bytes / SHARING.load(Relaxed)
}

/// Upper bound on the bytes of this process: [`available_bytes`] plus bytes already held.
pub fn reach_bytes() -> Option<u64> {
    let root = Path::new("/");
    limits::available(root).map(|free| part(free) + limits::own(root).unwrap_or(0))
}

/// Checks that the address space limit (`ulimit -v`) has room for a new thread's stack and the mappings
/// made along with it. Thread creation cannot report a failure of the latter: the process aborts.
///
/// # Errors
/// The limit is too low.
pub fn room_for_thread(stack: usize) -> std::io::Result<()> {
    const BESIDE: u64 = 1 << 20;
    match limits::addresses(Path::new("/")) {
        Some(left) if left < stack as u64 + BESIDE => {
            Err(std::io::Error::other(format!("the limit on addresses leaves {left} bytes")))
        }
        _ => Ok(()),
    }
}

/// Reads a line "KEY  N kB" of a `/proc` file, in bytes.
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
        // Other tests allocate too, but far less.
        assert!(super::live_bytes().is_some_and(|b| b >= 64 << 20), "{:?}", super::live_bytes());
        assert!(super::peak_bytes() >= super::live_bytes());
        drop(big);
    }
}
