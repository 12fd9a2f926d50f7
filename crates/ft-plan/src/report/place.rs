//! Place of a peak, in words.

use crate::memory::{Peak, Phase};

/// Describes the place of a peak.
pub fn place(peak: &Peak, layers: usize) -> String {
    place_of(peak.phase, peak.unit, layers)
}

/// Describes a phase and a unit of the walk.
pub fn place_of(phase: Phase, unit: usize, layers: usize) -> String {
    let unit = match (phase, unit) {
        (Phase::Load | Phase::Step | Phase::Save, _) => return phase.word().into(),
        (_, 0) => "the embedding".to_string(),
        (_, u) if u > layers => "the head".to_string(),
        (_, u) => format!("layer {}", u - 1),
    };
    format!("{} of {unit}", phase.word())
}
