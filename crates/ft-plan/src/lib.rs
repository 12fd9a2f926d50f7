//! Memory plan: recipe + model config + world -> bytes of each rank by component, and the peak. Needs no
//! weights and no GPU.
//!
//! Modules, in the order of the work:
//!
//! ```text
//! model/      config from a folder, the hub's cache, or built in;   workload/   tokens of micro-batches
//! memory/     model states of a rank, visits of the engine's own modules on ghosts, the simulated run
//! time/       FLOPs and other costs of a step;   rates, links: measured by `ft bench`
//! host/       host memory, disks, shared memory: required and available bytes
//! inference/  memory for `ft chat`, and for the server of `serve.devices`
//! search/     fastest execution that fits
//! plan/       the plan of a recipe;   hints: changes to make it fit
//! layouts/    plans of layouts of ranks, by predicted time
//! resolve     config and selection of a recipe, shared with runs
//! report/     text and JSON
//! ```
//!
//! Operations of `ft-kernels` account for their own allocations and FLOPs: the plan runs the engine's `forward` and
//! `backward` on ghosts ([`ft_kernels::tensor`]). Tests compare plans with real runs: on the CPU the measured peak is
//! within 1% of the plan.

#![forbid(unsafe_code)]
#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, clippy::too_many_lines, reason = "tests write files, and list cases")
)]

mod error;
mod host;
mod inference;
mod layouts;
mod memory;
mod model;
mod plan;
pub mod report;
pub mod resolve;
mod search;
mod time;
mod units;
mod workload;

#[cfg(test)]
mod tests;

pub use error::Error;
pub use ft_kernels::Machine;
pub use host::{Capacity, HostPlan, beside_device, budget, card, card_names, card_too_old};
pub use inference::{InferenceMemory, InferenceModel, Server};
pub use layouts::{Candidate, Devices, Layout, Layouts, Limit, Rates, Step, layouts_of_recipe, predict};
pub use memory::{Allocation, Bytes, Component, Peak, Phase, Theory};
pub use model::{Target, machine, source, stored};
pub use plan::{Hint, Pipelined, Plan, allocations, of_recipe, of_recipe_in};
pub use resolve::Resolved;
pub use search::{Inputs, Reasons, SearchResult};
pub use time::{actions, links, probe, rates};
pub use workload::{Tokens, Workload, Workloads, check_steps};
