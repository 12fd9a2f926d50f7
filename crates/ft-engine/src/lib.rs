//! Engine of `ft`: models, their weights, adapters, and the passes over them.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests write files of their own"))]
#![forbid(unsafe_code)]

pub mod adapters;
pub mod export;
pub mod files;
pub mod load;
pub mod model;
pub mod optim;
pub mod params;
pub mod quant;
pub mod ranks;
pub mod walk;
