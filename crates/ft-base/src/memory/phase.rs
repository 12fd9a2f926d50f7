//! The phases of a run.

/// A phase of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Loading or initializing the weights.
    #[default]
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
