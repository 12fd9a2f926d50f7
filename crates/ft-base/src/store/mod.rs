//! File access, safe against malicious input.
//!
//! | module | contents |
//! |---|---|
//! | [`read`] | safe file names; plain files with a size limit; shard indexes; JSON without duplicate keys |
//! | [`mod@write`] | atomic writes of files and folders; logs; one writing process per folder |
//! | [`checkpoint`] | atomic checkpoint folders with hashes; retention of the last few |
//! | [`hash`] | BLAKE3 hashes of whole files, cached between commands |
//! | `cache` | the cache folder of `ft`, the home folder |
//! | `disk` | free space, and sizes in messages |
//! | `private` | files for one user alone |
//! | [`fault`] | fault points, at which a test aborts the process |
//!
//! Files are never mapped into memory, pickles are never read, and nothing outside of a model's folder
//! is opened.

#![allow(clippy::disallowed_methods, reason = "the functions that all others use")]

mod cache;
pub mod checkpoint;
mod disk;
mod error;
pub mod fault;
pub mod hash;
mod private;
pub mod read;
pub mod write;

#[cfg(test)]
pub mod small_disk;

pub use cache::{cache_folder, expand_home, sweep_oldest};
pub use checkpoint::{Checkpoint, Checkpoints, Draft};
pub use disk::{folder_bytes, free_bytes, human_bytes};
pub use error::Error;
pub use private::{read_private, write_private};
pub use read::index::{INDEX, SINGLE, is_pickle_name, parse as parse_index};
pub use read::{
    LARGEST, check_name, index, json, open_inside, open_plain, read_given, read_if_there, read_inside,
    read_plain, read_plain_text,
};
pub use write::{
    AtomicFile, AtomicFolder, RunLock, append, copy_inside, create, folder_of, remove_if_there, reopen,
    sweep_temporary, sync_folder, write_atomic, write_json,
};
