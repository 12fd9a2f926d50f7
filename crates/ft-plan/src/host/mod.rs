//! Host memory, shared memory and disks of a run.

mod budget;
mod capacity;
mod cards;
mod files;
mod parts;
mod plan;
#[cfg(test)]
mod tests;

pub use budget::{beside_device, budget};
pub use capacity::Capacity;
#[cfg(test)]
pub use capacity::Volume;
pub use cards::{Datasheet, card, card_names, card_too_old, datasheet_of, lacks_fp8, of_driver};
pub use parts::sum;
pub use plan::HostPlan;
