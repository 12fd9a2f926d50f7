//! `ft plan --devices N`: layouts of a recipe over N devices, by predicted time.

mod bounds;
mod layout;
mod predict;
mod report;
mod search;

pub use layout::Layout;
pub use predict::{Candidate, Limit, Rates, Step, predict};
pub use search::{Devices, Layouts, layouts_of_recipe};
