//! Memory that is in use: as the system counts it, and as this program's own allocations add up.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Allocations below this many bytes are not counted: tensors are larger, and there are few of them.
pub const COUNTED: usize = 1 << 10;

static LIVE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);
static TOTAL: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, counting allocations of [`COUNTED`] bytes and more.
///
/// A binary that wants its peak in `metrics.jsonl` compared with the plan makes it the global allocator, as
/// `ft` does; a library that is used elsewhere does not, and the figures are then absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counting;

fn add(bytes: usize) {
    if bytes >= COUNTED {
        let live = LIVE.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        PEAK.fetch_max(live, Relaxed);
        TOTAL.fetch_add(1, Relaxed);
    }
}

fn sub(bytes: usize) {
    if bytes >= COUNTED {
        LIVE.fetch_sub(bytes as u64, Relaxed);
    }
}

// SAFETY: every call goes to `System` with the layout it came with; counting touches atomics alone and
// allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise about `layout` is passed on.
        let p = unsafe { System.alloc(layout) };
        if !p.is_null() {
            add(layout.size());
        }
        p
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above. Zeroed pages come from the system untouched, so that they cost nothing until used.
        let p = unsafe { System.alloc_zeroed(layout) };
        if !p.is_null() {
            add(layout.size());
        }
        p
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: `p` came from this allocator, that is from `System`, with this layout.
        unsafe { System.dealloc(p, layout) };
        sub(layout.size());
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as for `dealloc`; the caller promises a `size` above 0.
        let new = unsafe { System.realloc(p, layout, size) };
        if !new.is_null() {
            sub(layout.size());
            add(size);
        }
        new
    }
}

/// Bytes of counted allocations that are live; `None` when this binary does not count.
pub fn live_bytes() -> Option<u64> {
    (TOTAL.load(Relaxed) > 0).then(|| LIVE.load(Relaxed))
}

/// Largest number of counted bytes that were live at once since the last [`reset_peak`].
pub fn peak_bytes() -> Option<u64> {
    (TOTAL.load(Relaxed) > 0).then(|| PEAK.load(Relaxed))
}

/// Lets the peak start again from what is live now.
pub fn reset_peak() {
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

/// Bytes that new work may take without swapping: what the system has available, within the limit of the
/// control group. `None` where neither is told.
pub fn available_bytes() -> Option<u64> {
    let system = field("/proc/meminfo", "MemAvailable:");
    let number = |p: &str| std::fs::read_to_string(p).ok()?.trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(max, now)| max.saturating_sub(now));
    [system, group].into_iter().flatten().min()
}

/// A line "KEY  N kB" of a file of the system, in bytes.
fn field(file: &str, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let kb = text.lines().find_map(|l| l.strip_prefix(key)?.trim().strip_suffix(" kB")?.trim().parse().ok());
    kb.map(|kb: u64| kb * 1024)
}

/// Bytes of a device: the most that the run ever used of its pool on CUDA, the resident size now on the CPU.
pub fn device_bytes(device: &candle_core::Device) -> u64 {
    match crate::kernel::cuda::pool_bytes(device) {
        Some((_, high)) => high,
        None => host_bytes(),
    }
}

/// Free and total bytes of the CUDA device in use, if there is one.
#[cfg(feature = "cuda")]
pub fn cuda_memory() -> Option<(u64, u64)> {
    let (free, total) = candle_core::cuda_backend::cudarc::driver::result::mem_get_info().ok()?;
    Some((free as u64, total as u64))
}

/// Free and total bytes of the CUDA device in use, if there is one: never in a build without CUDA.
#[cfg(not(feature = "cuda"))]
pub fn cuda_memory() -> Option<(u64, u64)> {
    None
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
