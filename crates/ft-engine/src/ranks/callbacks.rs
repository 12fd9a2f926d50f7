//! Callbacks for the abort of a group.

/// Called when the group aborts.
pub(super) type Callback = Box<dyn Fn() + Send + Sync>;

/// Runs the abort callbacks on a separate thread, so that no caller blocks on them.
pub(super) fn call_all(all: Vec<Callback>) {
    if !all.is_empty() {
        let call = std::thread::Builder::new().name("abort".into());
        // If no thread starts, blocked ranks end with the process.
        let _ = call.spawn(move || all.iter().for_each(|f| f()));
    }
}
