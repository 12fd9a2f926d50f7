//! Decoder math: hand-written forward and backward passes of every module.
//!
//! Model families are rows of a table ([`family`]) and share one decoder [`layer`]. Each module has
//! `forward -> (y, Saved)` and `backward(Saved, dy, accum) -> dx` on plain tensors without autograd. `Saved`
//! holds the saved activations of the backward pass; gradients of trained tensors go to the [`grad_accumulator`].
//!
//! Axes in names: `t` tokens of a micro-batch (documents end to end, no padding), `d` model width, `h`
//! query heads, `g` key/value heads, `c` channels per head, `f` feed-forward width, `v` vocabulary, `o`/`i`
//! output and input features, `r` LoRA rank, `e` experts, `k` experts per token, `n` rows sorted by expert.

pub mod attention;
mod config;
pub mod decoder;
pub mod delta;
pub mod embedding;
pub mod feed_forward;
pub mod head;
pub mod layer;
mod layer_inputs;
pub mod linear;
pub mod mixer;
pub mod norm;
mod pass;
mod per_layer;
pub mod units;

#[cfg(test)]
pub(crate) use config::tests::tiny_qwen3_5_moe;
pub use config::{
    Biases, Config, Delta, Error, KeySource, Keys, LayerAttention, LayerInputs, Moe, Result, TOWERS,
    WeightFormat, current_name, family, modules, rope,
};
pub use decoder::Decoder;
pub use pass::batch::Batch;
pub use pass::{batch, context_parallel, grad_accumulator, sequence_parallel, shared_state, stage_boundary};
pub use units::Units;
