//! `ft run`: from a recipe to a result.

mod folder;
mod launch;
mod lead;
pub mod log;
mod options;
mod prepare;
mod processes;
mod result_cache;
pub mod server;
pub mod signals;
mod trainer;

pub use folder::check_writable;
pub use launch::run;
pub use options::{Options, Outcome};
