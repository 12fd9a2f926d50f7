//! Bytes on disk, hostile input assumed.
//!
//! | file | what it does |
//! |---|---|
//! | [`index`] | a shard index, checked |
//! | `path` | which files may be opened: plain ones, inside the folder that was named |
//! | `json` | JSON objects with each key once |
//! | `input` | whole small files, plain ones alone, no larger than anybody means |
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
