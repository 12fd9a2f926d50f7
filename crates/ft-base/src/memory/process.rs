//! Memory of this process and available to it, from the system.

use super::limits;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::{io, thread};

/// Peak resident size of this process in bytes; 0 if unknown.
pub fn peak_host_bytes() -> u64 {
    limits::field(Path::new("/proc/self/status"), "VmHWM:").unwrap_or(0)
}

/// Resident size of this process in bytes; 0 if unknown.
pub fn host_bytes() -> u64 {
    limits::field(Path::new("/proc/self/status"), "VmRSS:").unwrap_or(0)
}

/// Number of processes of this run with an equal share of the machine's memory.
static SHARING: AtomicU64 = AtomicU64::new(1);

/// Divides the machine's memory evenly among this many processes, including this one.
pub fn share_among(processes: u64) {
    SHARING.store(processes.max(1), Relaxed);
}

/// Bytes available to new work without swapping, within control group and process limits. With several
/// processes per machine, this process's share. `None` if unknown.
pub fn available_bytes() -> Option<u64> {
    limits::available(Path::new("/")).map(part)
}

/// This process's share of bytes available to all processes of the run.
pub fn part(bytes: u64) -> u64 {
    bytes / SHARING.load(Relaxed)
}

/// Upper bound on the bytes of this process: [`available_bytes`] plus bytes already held.
pub fn reach_bytes() -> Option<u64> {
    let root = Path::new("/");
    limits::available(root).map(|free| part(free) + limits::own(root).unwrap_or(0))
}

/// Checks that the address space limit (`ulimit -v`) has room for a new thread's stack and the mappings
/// made along with it. Thread creation cannot report a failure of the latter: the process aborts.
///
/// # Errors
/// The limit is too low.
pub fn room_for_thread(stack: usize) -> io::Result<()> {
    const MAPPINGS: u64 = 1 << 20;
    let left = limits::addresses(Path::new("/")).filter(|left| *left < stack as u64 + MAPPINGS);
    left.map_or(Ok(()), |left| Err(io::Error::other(format!("the limit on addresses leaves {left} bytes"))))
}

/// Calls a function on a thread with a stack of this many bytes, and waits; the inner error is a panic.
///
/// # Errors
/// The thread cannot start.
pub fn on_stack<T: Send>(stack: usize, f: impl FnOnce() -> T + Send) -> io::Result<thread::Result<T>> {
    thread::scope(|scope| Ok(thread::Builder::new().stack_size(stack).spawn_scoped(scope, f)?.join()))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_memory_of_the_process_is_measured() {
        let (now, peak) = (super::host_bytes(), super::peak_host_bytes());
        // read one after the other, while other tests allocate and free
        assert!(now > 1 << 20 && peak > 1 << 20, "{now} {peak}");
        assert!(super::available_bytes().is_some_and(|b| b > 1 << 20));
    }
}
