//! GGUF export of models and adapters for llama.cpp: metadata keys, tensor names, rotary channel order,
//! tokenizer.
//!
//! Anything llama.cpp would compute differently is refused by name.

mod adapter;
mod changes;
mod checks;
mod entries;
mod error;
mod keys;
mod model;
mod mxfp4;
mod names;
mod tokenizer;

pub use adapter::write_adapter;
pub use error::Error;
pub use model::write_model;
