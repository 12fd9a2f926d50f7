//! Where in a run the engine is: for peaks by phase, and for what to say when memory runs out.
//!
//! One process trains one model, so this is the process's, as the counts of [`super::memory`] are. Where several ranks
//! are threads of it, phases are the first one's: the others know where they are themselves.

use super as memory;
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What the engine is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Reading or making the weights.
    Load,
    /// Forward over the layers.
    Forward,
    /// Backward over the layers.
    Backward,
    /// The optimizer.
    Step,
    /// Evaluation.
    Evaluate,
    /// Writing checkpoints and the result.
    Save,
}

impl Phase {
    /// All of them, in the order of a run.
    pub const ALL: [Phase; 6] =
        [Phase::Load, Phase::Forward, Phase::Backward, Phase::Step, Phase::Evaluate, Phase::Save];

    /// In words.
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
    /// Where this thread's rank is, if it is not the first.
    static OWN: Cell<Option<(Phase, usize)>> = const { Cell::new(None) };
}

/// From here on this thread is a rank that only follows.
pub fn follow() {
    OWN.set(Some((Phase::Load, 0)));
}

/// Says what comes next, and at which unit of the walk: 0 the embedding, then the layers, the last is the head.
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

/// Says at which unit the phase goes on.
pub fn at_unit(unit: usize) {
    if let Some((phase, _)) = OWN.get() {
        return OWN.set(Some((phase, unit)));
    }
    UNIT.store(unit, Relaxed);
}

/// Where the engine is.
pub fn now() -> (Phase, usize) {
    OWN.get().unwrap_or_else(everybody)
}

/// Where the process is.
pub(super) fn everybody() -> (Phase, usize) {
    (Phase::ALL[PHASE.load(Relaxed).min(Phase::ALL.len() - 1)], UNIT.load(Relaxed))
}
