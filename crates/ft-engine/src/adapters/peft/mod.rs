//! Adapter folders in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

mod adapter;
mod config;
mod format;
mod fused;
mod save;
mod selection;
mod write;

pub use adapter::Adapter;
pub use config::PeftConfig;
pub use format::{PREFIX, metadata, scale};
pub use save::{Values, needs_neutral, neutral, save};
pub use write::config_json;
