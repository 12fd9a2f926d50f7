//! Tokens of a run.

mod reference;
mod tokens;
#[expect(clippy::module_inception, reason = "the type of the folder's name")]
mod workload;
mod workloads;

pub use reference::{ReferencePass, reference_bytes};
pub use tokens::Tokens;
pub use workload::{Known, Workload, check_steps};
pub use workloads::Workloads;
