//! Tasks on preferences: pairs of a chosen and a rejected completion, and rated completions.
//!
//! Every loss is a function of the log-probabilities of whole completions, under the model and under a reference.
//!
//! ```text
//! reference    log-probabilities under the reference, once, before training; cached
//! other        another model as reference
//! sequences    log-probabilities of documents, in forward passes
//! loss         losses and their derivatives
//! tally        sums over a step, metrics
//! preferences  the task of a run
//! ```
//!
//! In a step, the head first computes the losses of a micro-batch's targets. Their sums give one factor per completion,
//! the weight of the targets in the backward pass. The factors of KTO depend on all rows of the step, by an estimate
//! from a forward pass before.

mod loss;
mod preferences;
mod reference;
pub mod reference_model;
mod sequences;
mod tally;

pub use preferences::{Group, Preferences};
pub use reference::{ReferenceInputs, ReferenceScores};
pub use sequences::{Scorer, samples_of};
pub use tally::{Tally, WORDS};
