//! Verbs on a model or an adapter.

pub mod export;
mod gguf;
pub mod merge;
mod original;
pub mod push;
pub mod quantize;
