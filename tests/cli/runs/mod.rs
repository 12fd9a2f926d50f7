//! The life of a run: early ends, resuming, leftovers, whole results, its report.

mod report;
pub mod resume;
mod stale;
pub mod stops;
mod whole;
