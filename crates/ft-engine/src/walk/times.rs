//! Time of a step by part.

use candle_core::{Device, Result};
use ft_kernels::moment::Moment;
use ft_kernels::tensor::On;

/// Part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Collation of a micro-batch and copy to the device.
    Data,
    /// Forward pass of embedding and layers.
    Forward,
    /// Forward and backward pass of head and loss.
    Head,
    /// Recomputation of layers.
    Recompute,
    /// Backward pass of layers and embedding.
    Backward,
    /// Gradient norm, clipping, optimizer.
    Step,
}

impl Part {
    /// All parts in the order of a step.
    pub const ALL: [Part; 6] =
        [Part::Data, Part::Forward, Part::Head, Part::Recompute, Part::Backward, Part::Step];

    /// Name in metrics and reports.
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

/// Accumulated time by part.
#[derive(Debug)]
pub struct Times {
    /// Start and laps not yet summed; `None` if timing is off.
    laps: Option<(Moment, Vec<(Part, Moment)>)>,
    sums: [f64; Part::ALL.len()],
}

impl Times {
    /// Disabled timer: laps do nothing.
    pub fn off() -> Self {
        Self { laps: None, sums: [0.0; Part::ALL.len()] }
    }

    /// Starts timing. A lap records a device event and never blocks.
    pub fn start(device: &Device) -> Result<Self> {
        Ok(Self { laps: Some((Moment::now(device)?, Vec::new())), ..Self::off() })
    }

    /// Adds the time since the last lap to `part`.
    pub fn lap<'a>(&mut self, part: Part, device: impl Into<On<'a>>) -> Result<()> {
        if let (Some((_, laps)), On::Real(device)) = (&mut self.laps, device.into()) {
            laps.push((part, Moment::now(device)?));
        }
        Ok(())
    }

    /// Waits for the last lap and adds the pending laps to the sums.
    pub fn settle(&mut self) -> Result<()> {
        if let Some((from, laps)) = &mut self.laps {
            for (part, at) in laps.drain(..) {
                self.sums[part as usize] += at.since(from)?;
                *from = at;
            }
        }
        Ok(())
    }

    /// Seconds of a part, over settled laps.
    pub fn seconds(&self, part: Part) -> f64 {
        self.sums[part as usize]
    }

    /// Seconds of all parts, over settled laps.
    pub fn total(&self) -> f64 {
        self.sums.iter().sum()
    }
}
