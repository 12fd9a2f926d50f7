//! Input and gradients of a pass: the micro-batch and the sink.

pub mod across;
pub mod batch;
pub mod cut;
pub mod sink;
