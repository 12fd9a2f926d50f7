//! Engine of `ft`: models, their weights, adapters, and the passes over them.

#![forbid(unsafe_code)]

pub mod adapt;
pub mod files;
pub mod gguf;
pub mod load;
pub mod model;
pub mod optim;
pub mod quant;
pub mod ranks;
pub mod walk;
