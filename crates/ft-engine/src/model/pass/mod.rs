//! Input, state and gradients of a pass: the micro-batch, what layers hand to later ones, and the sink.

pub mod across;
pub mod batch;
pub mod between;
pub mod cut;
pub mod sink;
