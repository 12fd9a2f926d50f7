//! What the user wrote: the recipe, typed and checked for itself.
//!
//! Only this module knows TOML. What a recipe *means* for a model (which tensors a rule chooses, how many
//! bytes it takes) is decided elsewhere, from these types.

mod types;

pub use types::*;

/// Problems of a recipe: all of them at once, each with its place.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub String);
