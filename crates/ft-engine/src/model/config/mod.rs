//! Reads `config.json` of transformers 4 and 5 into one [`Config`].
//!
//! Unsupported keys with an effect on the numbers are refused by name. Unknown keys are listed in
//! [`Config::unknown`]. Keys of rotary embeddings, windows and tied heads ignored by transformers are listed in
//! [`Config::notes`], and refused in overrides. Absent keys have the defaults of transformers' classes.

mod defaults;
mod error;
pub mod family;
mod keys;
mod layers;
mod limits;
pub mod modules;
mod parse;
pub mod rope;
mod rules;
mod spelling;
#[cfg(test)]
pub(super) mod tests;
mod types;

pub use error::{Error, Result};
pub use keys::Keys;
pub use spelling::{TOWERS, current_name};
pub use types::{Biases, Config, Delta, KeySource, LayerAttention, LayerInputs, Moe, WeightFormat};
