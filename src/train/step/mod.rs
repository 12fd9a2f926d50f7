//! One optimizer step, on one rank or many.

mod accumulate;
pub mod command;
mod context;
pub mod finite;
mod gather;
mod loss_scale;
mod micros;
mod pipeline;
mod reduce;
mod sums;
mod turn;
mod update;

#[cfg(test)]
pub use accumulate::small_device;
pub use context::{StepInput, StepOutput, TrainContext, TrainedModel};
pub use gather::Gather;
pub use loss_scale::LossScale;
pub use turn::{LocalMicroBatch, Ranks, Stop, check_stop};
