//! Device memory of a rank: model states, visits of a run, and their peak.

mod component;
mod ghost_model;
pub mod overhead;
mod simulation;
mod states;
mod theory;
mod visits;
#[cfg(test)]
mod work_tests;

pub use component::{Allocation, Bytes, Component, Peak, Phase};
pub use ghost_model::GhostModel;
pub use simulation::{Settings, Simulation};
pub use states::{Flow, ModelStates, nf4, optimizer_bytes, rounded};
#[cfg(test)]
pub use theory::NF4_BITS;
pub use theory::Theory;
pub use visits::{Answers, Segments, StepInputs};
