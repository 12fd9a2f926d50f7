//! Input and gradients of a pass: the micro-batch and the sink.

pub mod batch;
pub mod sink;
