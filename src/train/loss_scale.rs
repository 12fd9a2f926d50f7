//! Dynamic loss scaling, for training in f16 (Micikevicius et al., "Mixed precision training", 2018).
//!
//! f16 has no numbers below 6e-8 and none above 65,504, so that small gradients vanish: the loss is multiplied by a power
//! of two before the backward pass, and the gradients, summed in f32, are divided by it. As PyTorch's `GradScaler` does,
//! the scale begins at 65,536 (or `memory.scale`), is halved when a gradient overflows and doubled after 2,000 steps in which none did. A step
//! that overflowed is done again with the lower scale, instead of left out: no data is lost.

use candle_core::DType;
use serde::{Deserialize, Serialize};

/// Where the scale begins if the recipe does not say.
const FIRST: u64 = 65_536;
/// The largest scale: the smallest f16 times it is 1.
const LARGEST: f64 = 16_777_216.0;
/// Steps without overflow after which the scale is doubled.
const PATIENCE: u32 = 2_000;

/// The factor on the loss, and for how long it has held.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    factor: f64,
    steps: u32,
}

impl LossScale {
    /// That of a run that begins, with `memory.scale` where that is given; `None` for dtypes that need none.
    pub fn new(dtype: DType, first: Option<u64>) -> Option<Self> {
        let factor = first.unwrap_or(FIRST) as f64;
        (dtype == DType::F16).then_some(Self { factor: factor.clamp(1.0, LARGEST), steps: 0 })
    }

    /// The factor on the loss.
    pub fn factor(self) -> f64 {
        self.factor
    }

    /// The scale after a gradient has overflowed; `None` where it cannot be lower.
    pub fn after_overflow(self) -> Option<Self> {
        (self.factor > 1.0).then_some(Self { factor: (self.factor / 2.0).max(1.0), steps: 0 })
    }

    /// The scale after a step in which none has.
    pub fn after_step(self) -> Self {
        match self.steps + 1 {
            PATIENCE => Self { factor: (2.0 * self.factor).min(LARGEST), steps: 0 },
            steps => Self { steps, ..self },
        }
    }

    /// Whether this is a scale that a run can have.
    pub fn is_sound(self) -> bool {
        (1.0..=LARGEST).contains(&self.factor) && self.steps < PATIENCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_after_patience_and_falls_at_once() {
        assert_eq!((LossScale::new(DType::BF16, None), LossScale::new(DType::F32, None)), (None, None));
        let first = LossScale::new(DType::F16, None).expect("f16 is scaled");
        let begin = FIRST as f64;
        let mut s = first;
        for _ in 0..PATIENCE - 1 {
            s = s.after_step();
            assert_eq!(s.factor(), begin);
        }
        s = s.after_step();
        assert_eq!(s, LossScale { factor: 2.0 * begin, steps: 0 });
        let mut falls = 0;
        while let Some(lower) = s.after_step().after_overflow() {
            assert_eq!(lower, LossScale { factor: s.factor() / 2.0, steps: 0 });
            assert!(lower.is_sound());
            (s, falls) = (lower, falls + 1);
        }
        assert_eq!((s.factor(), falls), (1.0, 17));
        for _ in 0..40 * PATIENCE {
            s = s.after_step();
        }
        assert_eq!(s.factor(), LARGEST);
        assert!(
            !LossScale { factor: 0.5, ..first }.is_sound()
                && !LossScale { factor: f64::NAN, ..first }.is_sound()
        );
    }
}
