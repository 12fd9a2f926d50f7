//! Task `classify`: cross-entropy over the classes, accuracy and F1.
//!
//! ```text
//! classes      loss and its gradient, from the scores of documents
//! confusion    counts of true and predicted classes
//! ```

mod classes;
mod confusion;

pub use classes::Classes;
