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
mod error;
pub mod fault;
mod folder;
pub mod hash;
pub mod index;
mod input;
pub mod json;
mod lock;
mod path;

#[cfg(test)]
pub mod small_disk;

pub use atomic::copy_inside;
pub use atomic::write_atomic;
pub use atomic::{Pending, folder_of, free_bytes, sweep_temporary, sync_folder};
pub use cache::{cache_folder, sweep_oldest};
pub use checkpoint::{Checkpoint, Checkpoints, Draft};
pub use error::Error;
pub use error::human_bytes;
pub use folder::NewFolder;
pub use index::{INDEX, SINGLE, is_pickle_name, parse as parse_index};
pub use input::{LARGEST, open_plain, read_given, read_plain, read_plain_text};
pub use lock::RunLock;
pub use path::{check_name, open_inside, read_inside};
