//! Atomic writes: files, folders, and locks on folders.

mod atomic;
mod folder;
mod lock;
mod run_lock;
mod workspace;

pub use atomic::{AtomicFile, copy_inside, folder_of, sweep_temporary, sync_folder, write_atomic};
pub use folder::AtomicFolder;
pub use run_lock::RunLock;
