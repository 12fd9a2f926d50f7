//! Signals that ask a run to stop: SIGINT, SIGTERM, SIGHUP.
//!
//! While a run has something to save, the first of them is a flag that the loop looks at between micro-batches, and the
//! second ends the process at once. Before and after that the first one ends it: nothing would be lost.

use super::Error;
use ft_base::error::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// The signals, by their names and the exit codes that they ask for.
const SIGNALS: [(i32, &str, ExitCode); 3] = [
    (signal_hook::consts::SIGINT, "SIGINT", ExitCode::Interrupted),
    (signal_hook::consts::SIGTERM, "SIGTERM", ExitCode::Terminated),
    (signal_hook::consts::SIGHUP, "SIGHUP", ExitCode::HungUp),
];

/// Handlers are process-wide, and set once.
static HANDLERS: OnceLock<Handlers> = OnceLock::new();

#[derive(Clone)]
struct Handlers {
    /// Whether a signal ends the process at once; the first one sets it for the next.
    at_once: Arc<AtomicBool>,
    /// Place in [`SIGNALS`] of the last one that came, plus 1.
    seen: Arc<AtomicUsize>,
}

/// Signals of a run, caught until this is dropped.
pub struct Signals(Handlers);

impl Signals {
    /// From here on a signal ends the process with its exit code, until [`Signals::hold`].
    ///
    /// # Errors
    /// A system that does not let them be caught.
    pub fn catch() -> ft_base::Result<Self> {
        let handlers = match HANDLERS.get() {
            Some(there) => there.clone(),
            None => {
                let new = Handlers { at_once: Arc::new(AtomicBool::new(true)), seen: Arc::default() };
                new.register().map_err(|e| Error::Usage(format!("signals cannot be caught: {e}")))?;
                HANDLERS.get_or_init(|| new).clone()
            }
        };
        handlers.seen.store(0, Ordering::Relaxed);
        Ok(Self(handlers))
    }

    /// From here on the first signal waits to be [seen](Signals::seen).
    pub fn hold(&self) {
        self.0.at_once.store(false, Ordering::Relaxed);
    }

    /// From here on a signal ends the process at once again.
    pub fn release(&self) {
        self.0.at_once.store(true, Ordering::Relaxed);
    }

    /// The signal that came, and the exit code that it asks for.
    pub fn seen(&self) -> Option<(&'static str, ExitCode)> {
        let place = self.0.seen.load(Ordering::Relaxed).checked_sub(1)?;
        SIGNALS.get(place).map(|(_, name, code)| (*name, *code))
    }

    /// The same as a number that ranks tell one another; 0 where none came.
    pub fn asked(&self) -> u64 {
        self.0.seen.load(Ordering::Relaxed) as u64
    }

    /// Takes one that another rank was sent for one of this process's, where it has none.
    pub fn hear(&self, asked: u64) {
        let place = usize::try_from(asked).unwrap_or_default();
        let _ = self.0.seen.compare_exchange(0, place, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.release();
    }
}

impl Handlers {
    fn register(&self) -> std::io::Result<()> {
        use signal_hook::flag;
        for (i, (signal, name, code)) in SIGNALS.into_iter().enumerate() {
            // nohup says so
            if name == "SIGHUP" && ignored(signal) {
                continue;
            }
            // in this order: what the first signal sets, the second finds
            flag::register_conditional_shutdown(signal, code as i32, Arc::clone(&self.at_once))?;
            flag::register(signal, Arc::clone(&self.at_once))?;
            flag::register_usize(signal, Arc::clone(&self.seen), i + 1)?;
        }
        Ok(())
    }
}

/// Whether the process was started with a signal ignored; where the system does not tell, it was not.
fn ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).map(str::trim);
    mask.and_then(|m| u64::from_str_radix(m, 16).ok()).is_some_and(|m| m >> (signal - 1) & 1 == 1)
}
