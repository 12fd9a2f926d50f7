//! Tasks other than the next token: preferences, rewards, classes, distillation, answers of evaluations.

mod answers;
mod distill;
mod heads;
pub mod learned;
mod preference;
mod reference;
