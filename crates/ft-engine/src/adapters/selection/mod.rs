//! Selection of trained modules and methods.

mod choice;
pub(super) mod rules;
mod selected;
mod token_rules;
pub(super) mod tokens;
mod trained;

pub use choice::Choice;
pub use selected::Selection;
pub use tokens::Tokens;
pub use trained::{Fused, Part, Trained, TrainedPart, part_name, tensor_name};
