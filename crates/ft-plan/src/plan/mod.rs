//! Memory plan of a rank, and changes to make a run fit.

pub(crate) mod hints;
mod make;
#[expect(clippy::module_inception, reason = "the type of the folder's name")]
mod plan;
mod recipe;

pub use make::allocations;
pub use plan::{Hint, Pipelined, Plan};
pub(crate) use recipe::Model;
pub use recipe::{of_recipe, of_recipe_in};
