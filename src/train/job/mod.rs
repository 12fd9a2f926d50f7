//! A resolved recipe, without the weights of the model.

mod cache_4bit;
mod data;
pub mod device;
pub mod hash;
#[allow(clippy::module_inception)]
mod job;
mod lookup;
mod planning;
pub mod rows;
pub mod sources;

pub use device::{device, dtype, one_device};
pub use ft_plan::resolve::{check_model, check_override, of_task};
pub use job::Job;
pub use lookup::{
    adapter, config, model, samples, selection, tell_idle, tell_init_quantize, tell_quantize, token_rows,
    tokenizer, tokenizer_of, unread_variable,
};
pub use planning::check_products;
