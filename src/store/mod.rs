//! Bytes on disk, hostile input assumed.
//!
//! | file | what it does |
//! |---|---|
//! | `read` | tensors by name and by rows, from one file or the shards of a model |
//! | `header`, `index` | what a safetensors file and a shard index say, checked |
//! | `path` | which files may be opened: plain ones, inside the folder that was named |
//! | `json` | JSON objects with each key once |
//! | `input` | whole small files, plain ones alone, no larger than anybody means |
//! | `convert` | the file's number formats to the dtype asked for, in parallel |
//! | `write` | one safetensors file, or shards with an index, streamed |
//! | `atomic` | whole or absent: temporary name, fsync, rename, fsync of the folder |
//! | [`checkpoint`] | folders of files that are whole or absent, with hashes; keep the last few |
//! | `folder` | folders that are whole or absent: a run's result, merged models, exports, caches |
//! | `lock` | one process a folder |
//! | `hash` | BLAKE3 of whole files, kept between commands |
//! | `cache` | the folder of what is kept between commands |
//! | [`fault`] | named places where a test ends the process |
//!
//! No file is mapped into memory, no pickle is read, nothing outside of a model's folder is opened.

mod atomic;
mod cache;
pub mod checkpoint;
mod convert;
mod error;
pub mod fault;
mod folder;
mod gguf;
pub(crate) mod hash;
mod header;
mod index;
mod input;
pub(crate) mod json;
mod lock;
mod path;
mod read;
mod write;

#[cfg(test)]
pub(crate) mod small_disk;
#[cfg(test)]
mod tests;

pub(crate) use atomic::copy_inside;
pub use atomic::write_atomic;
pub(crate) use atomic::{Pending, free_bytes, sweep_temporary};
pub(crate) use cache::{cache_folder, sweep_oldest};
pub use checkpoint::{Checkpoint, Checkpoints, Draft};
pub use error::Error;
#[cfg(feature = "hub")]
pub(crate) use error::human_bytes;
pub use folder::NewFolder;
pub use gguf::{GgufValue, write_gguf};
pub(crate) use index::{INDEX, parse as parse_index};
pub use input::{LARGEST, open_plain, read_given, read_plain, read_plain_text};
pub use lock::RunLock;
pub(crate) use path::read_inside;
pub(crate) use read::SINGLE;
#[cfg(feature = "hub")]
pub(crate) use read::is_pickle_name;
pub use read::{FileHash, TensorFiles, TensorInfo};
pub use write::{SharedFile, write_file, write_sharded};
