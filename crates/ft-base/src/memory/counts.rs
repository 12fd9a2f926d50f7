//! Counts of allocated bytes: live, peak, per phase, per rank.

use super::phase::Phase;
use std::cell::Cell;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Allocations below this size (bytes) are not counted. Tensors are larger, and few enough to count.
pub const COUNTED: usize = 1 << 10;

static LIVE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);
static TOTAL: AtomicU64 = AtomicU64::new(0);
/// Peaks of completed phases, in the order of [`Phase::ALL`].
static PHASES: [AtomicU64; Phase::ALL.len()] = [const { AtomicU64::new(0) }; Phase::ALL.len()];

/// Counted bytes of one rank, when ranks are threads of this process.
#[derive(Default)]
struct RankCounts {
    live: AtomicI64,
    peak: AtomicI64,
}

/// Counts of all ranks, in order. Never freed: threads refer to them until the process ends.
static RANKS: Mutex<Vec<&'static RankCounts>> = Mutex::new(Vec::new());

thread_local! {
    /// Counts of this thread's rank; `None` outside of a multi-rank run.
    static RANK: Cell<Option<&'static RankCounts>> = const { Cell::new(None) };
}

fn ranks() -> MutexGuard<'static, Vec<&'static RankCounts>> {
    RANKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Attributes all later allocations and deallocations of this thread to `rank`, or to none.
pub fn count_for(rank: Option<usize>) {
    RANK.set(rank.map(|rank| {
        let mut ranks = ranks();
        while ranks.len() <= rank {
            ranks.push(Box::leak(Box::default()));
        }
        ranks[rank]
    }));
}

/// Resets the counts of all ranks, before ranks start again.
pub fn reset_ranks() {
    for r in ranks().iter() {
        r.live.store(0, Relaxed);
        r.peak.store(0, Relaxed);
    }
}

/// Maximum over ranks of live bytes, and of peak bytes; zeros without multiple ranks.
pub fn largest_rank() -> (u64, u64) {
    let ranks = ranks();
    let most = |of: fn(&RankCounts) -> &AtomicI64| ranks.iter().map(|r| of(r).load(Relaxed)).max();
    let [live, peak] = [most(|r| &r.live), most(|r| &r.peak)].map(|n| n.unwrap_or(0).max(0) as u64);
    (live, peak)
}

fn count(bytes: i64) {
    if let Some(r) = RANK.get() {
        let live = r.live.fetch_add(bytes, Relaxed) + bytes;
        r.peak.fetch_max(live, Relaxed);
    }
}

pub(super) fn add(bytes: usize) {
    if bytes >= COUNTED {
        count(bytes as i64);
        let live = LIVE.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        PEAK.fetch_max(live, Relaxed);
        TOTAL.fetch_add(1, Relaxed);
    }
}

pub(super) fn sub(bytes: usize) {
    if bytes >= COUNTED {
        count(-(bytes as i64));
        LIVE.fetch_sub(bytes as u64, Relaxed);
    }
}

/// Live counted bytes, whether the binary counts or not.
pub(super) fn live() -> u64 {
    LIVE.load(Relaxed)
}

/// Peak since the phase began.
pub(super) fn phase_peak() -> u64 {
    PEAK.load(Relaxed)
}

/// Peaks of the completed phases, in the order of [`Phase::ALL`].
pub(super) fn completed_peaks() -> [u64; Phase::ALL.len()] {
    PHASES.each_ref().map(|p| p.load(Relaxed))
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

/// Ends a phase. The peak of the next one starts at the bytes live now.
pub(super) fn close_phase(phase: usize) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_allocations_are_counted() {
        let big = vec![1u8; 64 << 20];
        // Other tests allocate too: live bytes change between two calls.
        for bytes in [live_bytes(), peak_bytes()] {
            assert!(bytes >= Some(64 << 20), "{bytes:?}");
        }
        drop(big);
    }

    /// Regression: ranks from 64 on were not counted.
    #[test]
    fn every_rank_is_counted() {
        std::thread::spawn(|| {
            count_for(Some(1000));
            let big = vec![1u8; 8 << 20];
            assert!(largest_rank().0 >= 8 << 20 && largest_rank().1 >= 8 << 20);
            drop(big);
        })
        .join()
        .unwrap();
    }
}
