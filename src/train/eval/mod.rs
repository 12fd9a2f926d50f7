//! Evaluation: loss, generated answers, the best step, divergence.

mod divergence;
mod generation;
mod history;
mod loss;

pub use divergence::DivergenceCheck;
pub use generation::{Answer, add_to, check as check_questions, score, scores_line};
pub use history::{EvalHistory, Evaluation};
pub use loss::{evaluate, evaluate_loaded, logits_of_all, probe, probe_of};
