//! Methods and settings of training: results against other programs, and equal bits however a step is computed.

mod half;
mod initial;
mod offload;
mod optimizers;
mod rates;
mod same;
mod tokens;
