//! Engine of `ft`: models, their weights, adapters, and the passes over them.

#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, clippy::too_many_lines, reason = "tests write files, and list cases")
)]
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
