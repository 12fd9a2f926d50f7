//! Loads models, adapters and datasets from local folders, or from the Hugging Face hub through the
//! standard cache.
//!
//! Only required files are downloaded, weights only as safetensors. Downloads must have the size listed by
//! the hub. Local folders never cause network access.

#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, clippy::too_many_lines, reason = "tests write files, and list cases")
)]
#![forbid(unsafe_code)]

mod datasets;
mod error;
mod files;
mod model;
mod push;
mod request;
mod settings;

#[cfg(feature = "hub")]
mod choose;
#[cfg(feature = "hub")]
mod progress;
#[cfg_attr(not(feature = "hub"), path = "no_remote.rs")]
mod remote;
#[cfg(test)]
mod tests;

pub use datasets::fetch_dataset_with;
pub use error::Error;
pub use model::{fetch_adapter, fetch_adapter_with, fetch_model, fetch_model_with};
pub use push::{check_name, push_with};
pub use request::{DatasetFiles, DatasetName, ModelDir, Push, Want};
pub use settings::Settings;
