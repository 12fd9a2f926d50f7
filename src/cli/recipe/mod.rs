//! Verbs that read a recipe without loading weights.

pub mod check;
pub mod data;
pub mod import;
pub mod init;
mod measure;
pub mod plan;
pub mod recipes;
pub mod schema;
mod summary;
