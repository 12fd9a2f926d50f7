//! The current phase and unit of the engine, for peaks by phase and for out-of-memory messages.
//!
//! A process trains one model, so the position is global, like the counts of allocated bytes. If
//! several ranks are threads of one process, the global position is rank 0's, and the remaining ranks
//! track their own per thread.

pub use super::phase::Phase;

use super::counts;
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static PHASE: AtomicUsize = AtomicUsize::new(0);
static UNIT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Position of this thread's rank, unless it is rank 0.
    static OWN: Cell<Option<(Phase, usize)>> = const { Cell::new(None) };
}

/// Marks this thread as a rank other than 0, with a position of its own.
pub fn follow() {
    OWN.set(Some((Phase::Load, 0)));
}

/// Enters a phase at a unit of the walk: 0 is the embedding, then come the layers, then the head.
pub fn enter(phase: Phase, unit: usize) {
    if OWN.get().is_some() {
        return OWN.set(Some((phase, unit)));
    }
    let last = PHASE.swap(phase as usize, Relaxed);
    UNIT.store(unit, Relaxed);
    if last != phase as usize {
        counts::close_phase(last);
    }
}

/// Moves to another unit in the current phase.
pub fn at_unit(unit: usize) {
    if let Some((phase, _)) = OWN.get() {
        return OWN.set(Some((phase, unit)));
    }
    UNIT.store(unit, Relaxed);
}

/// Position of this thread's rank.
pub fn now() -> (Phase, usize) {
    OWN.get().unwrap_or_else(process_position)
}

/// Position of the process: rank 0's.
fn process_position() -> (Phase, usize) {
    (Phase::ALL[PHASE.load(Relaxed).min(Phase::ALL.len() - 1)], UNIT.load(Relaxed))
}

/// Peak per phase since the last [`super::reset_peak`], in the order of [`Phase::ALL`]; 0 for phases not entered.
pub fn phase_peaks() -> [u64; Phase::ALL.len()] {
    let mut peaks = counts::completed_peaks();
    let (now, _) = process_position();
    peaks[now as usize] = peaks[now as usize].max(counts::phase_peak());
    peaks
}
