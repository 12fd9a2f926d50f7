//! Tensors in files: safetensors read by name and by rows, written whole or in shards; GGUF written.

mod convert;
mod folder;
mod gguf;
mod header;
mod mxfp4;
mod read;
mod write;

#[cfg(test)]
mod tests;

pub use folder::{MODEL_FILES, TOKENIZER, TOKENIZER_FILES, torch_name, write_folder};
pub use ft_base::store::Error;
pub use gguf::{GgufValue, write_gguf};
pub use mxfp4::{MXFP4_BLOCK, MXFP4_MAGNITUDES};
pub use read::{FileHash, SplitTensor, TensorFiles, TensorInfo};
pub use write::{SharedFile, write_each, write_file, write_sharded};

/// Name, dtype and shape of a tensor to be written.
pub type Entry = (String, candle_core::DType, Vec<usize>);

/// The error for an operation of candle on a tensor.
fn wrong(name: &str, e: candle_core::Error) -> Error {
    Error::Tensor { name: name.to_string(), source: e.into() }
}
