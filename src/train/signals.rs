//! SIGINT and SIGTERM, on which a run saves first.

use super::Error;
use crate::error::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// SIGINT and SIGTERM as flags; a second one ends the process at once.
pub struct Signals {
    interrupt: Arc<AtomicBool>,
    terminate: Arc<AtomicBool>,
}

impl Signals {
    /// From here on.
    ///
    /// # Errors
    /// A system that does not let them be caught.
    pub fn catch() -> crate::Result<Self> {
        use signal_hook::consts::{SIGINT, SIGTERM};
        let s = Self { interrupt: Arc::default(), terminate: Arc::default() };
        for (signal, code, flag) in
            [(SIGINT, ExitCode::Interrupted, &s.interrupt), (SIGTERM, ExitCode::Terminated, &s.terminate)]
        {
            // in this order: the first signal sets the flag, the second finds it set
            signal_hook::flag::register_conditional_shutdown(signal, code as i32, Arc::clone(flag))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(flag)))
                .map_err(|e| Error::Usage(format!("signals cannot be caught: {e}")))?;
        }
        Ok(s)
    }

    /// The signal that came, and the exit code that it asks for.
    pub fn seen(&self) -> Option<(&'static str, ExitCode)> {
        if self.interrupt.load(Ordering::Relaxed) {
            Some(("SIGINT", ExitCode::Interrupted))
        } else if self.terminate.load(Ordering::Relaxed) {
            Some(("SIGTERM", ExitCode::Terminated))
        } else {
            None
        }
    }
}
