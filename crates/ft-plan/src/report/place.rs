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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_the_embedding_the_layers_and_the_head() {
        let places = [0, 1, 28, 29].map(|unit| place_of(Phase::Backward, unit, 28));
        let units = ["the embedding", "layer 0", "layer 27", "the head"];
        assert_eq!(places, units.map(|unit| format!("{} of {unit}", Phase::Backward.word())));
        assert_eq!(place_of(Phase::Load, 29, 28), Phase::Load.word());
    }
}
