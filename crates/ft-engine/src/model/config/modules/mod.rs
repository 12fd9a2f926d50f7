//! Enumerates all modules with weights from the config alone, under their names in checkpoints and PEFT.

mod feed_forward;
mod layer;
mod module;
mod tree;

pub use feed_forward::{FeedForwardTree, MlpTree};
pub use layer::{LayerTree, MixerTree};
pub use module::{CutAlong, Group, Kind, Module, Parameter, SCORE, Slice};
pub use tree::{Tree, constants, groups, modules, norm_offset, parameters};
