//! Search for the fastest fitting execution.

mod candidates;
mod choose;
mod prepared;
mod reasons;

pub use choose::{SearchResult, choose, choose_with_rows, least_work, reserve};
pub use prepared::{Inputs, KnownModels, Prepared};
pub use reasons::Reasons;
