//! Evaluation: loss, generated answers, the best step, divergence.

mod divergence;
mod generation;
mod history;
mod loss;

pub use divergence::DivergenceCheck;
pub use generation::{add_to, check_tokenizer, score, scores_line};
pub use history::EvalHistory;
pub use loss::{evaluate, evaluate_until, probe};
