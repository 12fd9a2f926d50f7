//! The current phase and unit of the engine, for peaks by phase and for out-of-memory messages.
//!
//! A process trains one model, so the position is global, like the counts of [`super::memory`]. If
//! several ranks are threads of one process, the global position is rank 0's, and the remaining ranks
//! track their own per thread.

use super as memory;
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Loading or initializing the weights.
    Load,
    /// Forward pass over the units.
    Forward,
    /// Backward pass over the units.
    Backward,
    /// Optimizer step.
    Step,
    /// Evaluation.
    Evaluate,
    /// Writing checkpoints and the result.
    Save,
}

impl Phase {
    /// All phases, in the order of a run.
    pub const ALL: [Phase; 6] =
        [Phase::Load, Phase::Forward, Phase::Backward, Phase::Step, Phase::Evaluate, Phase::Save];

    /// Name of the phase in messages.
    pub fn word(self) -> &'static str {
        match self {
            Phase::Load => "loading",
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Step => "optimizer step",
            Phase::Evaluate => "evaluation",
            Phase::Save => "saving",
        }
    }
}

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
        memory::close(last);
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
    OWN.get().unwrap_or_else(everybody)
}

/// Position of the process: rank 0's.
pub(super) fn everybody() -> (Phase, usize) {
    (Phase::ALL[PHASE.load(Relaxed).min(Phase::ALL.len() - 1)], UNIT.load(Relaxed))
}
