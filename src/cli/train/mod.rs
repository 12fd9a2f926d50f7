//! Verbs that compute with a recipe, and reports of their results.

pub mod bench;
pub mod eval;
pub mod logits;
pub mod processes;
pub mod report;
pub mod routes;
pub mod run;
