//! Fault injection: named points at which a test can abort the process, simulating a power cut.
//!
//! `FT_FAULT=commit.renamed:2` aborts at the second visit of the point `commit.renamed`. Compiled only
//! for tests and with the feature `fault`.

/// All fault points, in the order reached by saving a checkpoint and then writing a new folder.
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

/// Counts a visit of a fault point, and aborts the process if requested by `FT_FAULT`.
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
        // No unwinding, destructors or flushing: only the current state on disk survives.
        std::process::abort();
    }
}

/// Whether to simulate a file system without atomic exchange of folders: `FT_FAULT_NO_EXCHANGE` is set.
#[cfg(any(test, feature = "fault"))]
pub fn without_exchange() -> bool {
    std::env::var_os("FT_FAULT_NO_EXCHANGE").is_some()
}

/// Marks a fault point. Expands to nothing in an ordinary build.
macro_rules! fault {
    ($name:literal) => {
        #[cfg(any(test, feature = "fault"))]
        $crate::store::fault::hit($name);
    };
}
pub(crate) use fault;
