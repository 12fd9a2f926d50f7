//! Engine of `ft`: models, their weights, adapters, and the passes over them.

pub mod adapt;
pub mod base;
pub mod comm;
pub mod files;
pub mod gguf;
pub mod model;
pub mod optim;
pub mod quant;
pub mod walk;
