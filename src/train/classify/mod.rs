//! Task `classify`: cross-entropy over the classes, accuracy and F1.
//!
//! ```text
//! class_counts    counts of true and predicted classes
//! classes         loss and its gradient, from the scores of documents
//! ```

mod class_counts;
mod classes;

pub use classes::Classes;
