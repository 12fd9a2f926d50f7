//! Refusals of runs for lack of memory or disk space.

use super::place;
use crate::error::Error;
use crate::plan::Plan;
use crate::units::bytes;
use std::fmt::Write;

impl Plan {
    /// Refusal of the run, with hints.
    pub fn refusal(&self) -> Error {
        let mut s = self.lacks();
        for h in &self.hints {
            let _ = write!(s, "\n  hint: {}", h.text);
        }
        Error::DoesNotFit(s)
    }

    /// Refusal of the run, without hints.
    pub fn verdict(&self) -> Error {
        Error::DoesNotFit(self.lacks())
    }

    /// Shortages, one per line.
    fn lacks(&self) -> String {
        let mut lines = Vec::new();
        if !self.fits_device() {
            lines.push(format!(
                "this run needs {} at its peak (in {}), and {} is available",
                bytes(self.total()),
                place(&self.peak, self.layers),
                bytes(self.budget.unwrap_or(0))
            ));
        }
        if let Some(server) = self.server.as_ref().filter(|s| !s.fits()) {
            lines.push(format!(
                "the server beside it needs {}, and memory.budget is {}; to change: serve.devices",
                server.text(),
                bytes(server.budget.unwrap_or(0))
            ));
        }
        lines.extend(self.space.shortages(self.machine.cuda || self.fits_device()));
        lines.join("\n")
    }
}
