//! Inference: opens models and adapters to generate from, and follows the checkpoints of a run.
//!
//! ```text
//! source    path or hub id -> folder of a model or an adapter; converts checkpoints
//! options   options of verbs with a model; errors of options
//! device    values of --device
//! base      base model of an adapter
//! files     model, adapter and tokenizer of a fixed model; memory check, then weights
//! run_folder   recipe of a run
//! follow    newest checkpoint of a run
//! model     model to serve: fixed, or a followed run; one replica per device
//! prompt    conversation or text -> token ids
//! sampling  temperature, top-p, top-k, repetition penalty, seed -> sampler; generation_config.json
//! ```
//!
//! [`ft_engine::walk::generate`] holds the KV cache and the loop over tokens.

pub mod base;
pub mod device;
mod files;
mod follow;
mod model;
mod options;
mod prompt;
mod run_folder;
pub mod sampling;
mod source;

pub use files::{ContextLimit, ModelFiles};
pub use follow::Follower;
pub use model::{Model, ModelOptions, Replica};
pub use options::{LoadOptions, usage, words};
pub use prompt::Prompter;
pub use run_folder::{check_moved, recipe_of};
pub use source::Source;
