//! Engine of `ft`: models, their weights, adapters, and the passes over them.

pub mod adapters;
pub mod base;
pub mod comm;
pub mod export;
pub mod files;
pub mod model;
pub mod optim;
pub mod params;
pub mod quant;
pub mod walk;
