//! GGUF export of models and adapters for llama.cpp: metadata keys, tensor names, rotary channel order,
//! tokenizer.
//!
//! Anything llama.cpp would compute differently is refused by name.

mod adapter;
mod changes;
mod checks;
mod entries;
mod keys;
mod model;
mod mxfp4;
mod names;
mod tokenizer;

pub use crate::load::Error;
pub use adapter::write_adapter;
pub use model::write_model;

fn refuse<T>(place: impl Into<String>, why: impl Into<String>) -> Result<T, Error> {
    Err(Error { place: place.into(), why: why.into() })
}
