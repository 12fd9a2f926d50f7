//! Named places where a test can end the process, as a power cut would.
//!
//! `FT_FAULT=commit.renamed:2` aborts at the second time that the place `commit.renamed` is
//! reached. Compiled in for tests and with the feature `fault` only.

/// Every fault point, in the order that a save, and then a new folder, reaches them.
pub const POINTS: &[&str] = &[
    "draft.begun",
    "commit.file_synced",
    "atomic.created",
    "atomic.written",
    "atomic.synced",
    "atomic.renamed",
    "atomic.folder_synced",
    "commit.folder_synced",
    "commit.moved_aside",
    "commit.renamed",
    "commit.parent_synced",
    "commit.marked",
    "purge.unmarked",
    "purge.removed",
    "folder.begun",
    "folder.filled",
    "folder.synced",
    "folder.renamed",
    "folder.kept",
    "folder.exchanged",
    "folder.moved_aside",
    "folder.replaced",
    "folder.parent_synced",
    "folder.moved_over",
    "folder.settled",
];

/// Counts a visit of the place `name`, and ends the process if `FT_FAULT` asks for it.
#[cfg(any(test, feature = "fault"))]
pub fn hit(name: &str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static WANTED: OnceLock<Option<(String, u64)>> = OnceLock::new();
    static SEEN: AtomicU64 = AtomicU64::new(0);

    assert!(POINTS.contains(&name), "fault point {name} is not in the list");
    let wanted = WANTED.get_or_init(|| {
        let text = std::env::var("FT_FAULT").ok()?;
        let (name, count) = text.split_once(':')?;
        Some((name.to_string(), count.parse().ok()?))
    });
    if let Some((wanted, count)) = wanted
        && wanted == name
        && SEEN.fetch_add(1, Ordering::SeqCst) + 1 == *count
    {
        // No unwinding, no destructors, no flush: what is on disk now is all that is left.
        std::process::abort();
    }
}

/// Whether folders are to be replaced as on a file system that cannot exchange two: `FT_FAULT_NO_EXCHANGE` is set.
#[cfg(any(test, feature = "fault"))]
pub fn without_exchange() -> bool {
    std::env::var_os("FT_FAULT_NO_EXCHANGE").is_some()
}

/// Marks a fault point; nothing at all in an ordinary build.
macro_rules! fault {
    ($name:literal) => {
        #[cfg(any(test, feature = "fault"))]
        $crate::store::fault::hit($name);
    };
}
pub(crate) use fault;
