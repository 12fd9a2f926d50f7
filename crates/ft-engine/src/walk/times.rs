//! Where the time of a step goes.

use ft_kernels::moment::Moment;
use ft_kernels::tensor::On;
use candle_core::{Device, Result};

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
#[derive(Debug)]
pub struct Times {
    /// The moments of the laps, in order, the start before them; none where nobody asks for times.
    laps: Option<(Moment, Vec<(Part, Moment)>)>,
    sums: [f64; Part::ALL.len()],
}

impl Times {
    /// For a step whose times nobody asks for: laps do nothing.
    pub fn off() -> Self {
        Self { laps: None, sums: [0.0; Part::ALL.len()] }
    }

    /// Starts now. Laps take moments down and wait for nothing: a step is not slower for it.
    pub fn start(device: &Device) -> Result<Self> {
        Ok(Self { laps: Some((Moment::now(device)?, Vec::new())), ..Self::off() })
    }

    /// Counts the time since the last lap as `part`'s.
    pub fn lap<'a>(&mut self, part: Part, device: impl Into<On<'a>>) -> Result<()> {
        if let (Some((_, laps)), On::Real(device)) = (&mut self.laps, device.into()) {
            laps.push((part, Moment::now(device)?));
        }
        Ok(())
    }

    /// Adds up the laps so far, once the last one has passed; the next begins there.
    pub fn settle(&mut self) -> Result<()> {
        if let Some((from, laps)) = &mut self.laps {
            for (part, at) in laps.drain(..) {
                self.sums[part as usize] += at.since(from)?;
                *from = at;
            }
        }
        Ok(())
    }

    /// Seconds of a part, in laps that are settled.
    pub fn seconds(&self, part: Part) -> f64 {
        self.sums[part as usize]
    }

    /// Seconds of all parts.
    pub fn total(&self) -> f64 {
        self.sums.iter().sum()
    }
}
