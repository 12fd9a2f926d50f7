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

pub use folder::{MODEL_FILES, TOKENIZER, TOKENIZER_FILES, write_folder};
pub use ft_base::store::Error;
pub use gguf::{GgufValue, write_gguf};
pub use mxfp4::MXFP4_BLOCK;
pub use read::{FileHash, SplitTensor, TensorFiles, TensorInfo};
pub use write::{SharedFile, write_file, write_sharded};
