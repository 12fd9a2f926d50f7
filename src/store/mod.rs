//! File access, safe against malicious input.
//!
//! | file | contents |
//! |---|---|
//! | `read` | tensors by name and by rows, from one file or the shards of a model |
//! | `header`, `index` | validated headers of safetensors files, and shard indexes |
//! | `path` | safe file names: plain files inside a given folder |
//! | `json` | JSON objects without duplicate keys |
//! | `input` | whole small files: plain files with a size limit |
//! | `convert` | parallel conversion to the requested dtype |
//! | `write` | one safetensors file, or shards with an index, streamed |
//! | `gguf` | GGUF files, streamed |
//! | `atomic` | atomic file writes: temporary name, fsync, rename, fsync of the folder |
//! | [`checkpoint`] | atomic checkpoint folders with hashes; retention of the last few |
//! | `folder` | atomic folders: a run's result, merged models, exports, caches |
//! | `lock` | one writing process per folder |
//! | `hash` | BLAKE3 hashes of whole files, cached between commands |
//! | `cache` | the cache folder of `ft` |
//! | [`fault`] | fault points, at which a test aborts the process |
//!
//! Files are never mapped into memory, pickles are never read, and nothing outside of a model's folder
//! is opened.

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
