//! Trained parameters in flat buffers, and their loading.

pub mod buffers;
pub mod build;
mod exported;
mod flat;
pub mod learning_rates;
#[expect(clippy::module_inception, reason = "the type of the folder's name")]
mod params;

pub use buffers::allocate::Allocate;
pub use flat::FlatParam;
pub use learning_rates::LearningRate;
pub use params::Params;
