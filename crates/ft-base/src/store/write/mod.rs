//! Writing: files and folders, atomically or step by step, and locks on folders.

mod atomic;
mod folder;
mod lock;
mod plain;
mod run_lock;
mod workspace;

pub use atomic::{
    AtomicFile, copy_inside, folder_of, remove_if_there, sweep_temporary, sync_folder, write_atomic,
    write_json,
};
pub(super) use atomic::{TEMPORARY, removed, rename};
pub use folder::AtomicFolder;
pub use plain::{append, create, reopen};
pub use run_lock::RunLock;
