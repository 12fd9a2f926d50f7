//! Loading recipes from files, from text, and from the binary.

mod error;
mod recipe;
mod shipped;
mod yaml;

pub use error::Error;
#[cfg(test)]
pub(crate) use error::LARGEST;
pub use recipe::loose_value;
pub use shipped::{SHIPPED, Shipped};
