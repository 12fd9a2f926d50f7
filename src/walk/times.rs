//! Where the time of a step goes.

use crate::kernel::tensor::On;
use candle_core::Result;
use std::time::{Duration, Instant};

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Collating a micro-batch and copying it to the device.
    Data,
    /// Forward over embedding and layers.
    Forward,
    /// Head and loss, forward and backward.
    Head,
    /// Forward again, of layers that kept their input alone.
    Recompute,
    /// Backward over layers and embedding.
    Backward,
    /// Gradient norm, clipping, optimizer.
    Step,
}

impl Part {
    /// All of them, in the order of a step.
    pub const ALL: [Part; 6] =
        [Part::Data, Part::Forward, Part::Head, Part::Recompute, Part::Backward, Part::Step];

    /// In words.
    pub fn word(self) -> &'static str {
        match self {
            Part::Data => "data",
            Part::Forward => "forward",
            Part::Head => "head",
            Part::Recompute => "recompute",
            Part::Backward => "backward",
            Part::Step => "step",
        }
    }
}

/// Time by part.
#[derive(Clone, Debug)]
pub struct Times {
    last: Instant,
    /// Whether to wait for the device at each lap: exact times, and a slower step.
    wait: bool,
    sums: [Duration; Part::ALL.len()],
}

impl Times {
    /// Starts now. `wait` says whether to wait for the device at each lap.
    pub fn start(wait: bool) -> Self {
        Self { last: Instant::now(), wait, sums: [Duration::ZERO; Part::ALL.len()] }
    }

    /// Counts the time since the last lap as `part`'s.
    pub fn lap<'a>(&mut self, part: Part, device: impl Into<On<'a>>) -> Result<()> {
        if let (true, On::Real(device)) = (self.wait, device.into()) {
            device.synchronize()?;
        }
        let now = Instant::now();
        self.sums[part as usize] += now - self.last;
        self.last = now;
        Ok(())
    }

    /// Seconds of a part.
    pub fn seconds(&self, part: Part) -> f64 {
        self.sums[part as usize].as_secs_f64()
    }

    /// Seconds of all parts.
    pub fn total(&self) -> f64 {
        self.sums.iter().map(Duration::as_secs_f64).sum()
    }
}
