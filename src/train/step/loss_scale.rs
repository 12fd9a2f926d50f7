//! Dynamic loss scaling for f16 (Micikevicius et al., "Mixed Precision Training", 2018).
//!
//! The range of f16 is 6e-8 to 65,504, so small gradients underflow. The loss is multiplied by a power of
//! two before the backward pass, and the gradients, summed in f32, are divided by it. As in PyTorch's
//! `GradScaler`, the scale starts at 65,536 (or `memory.scale`), is halved on overflow, and is doubled
//! after 2,000 steps without overflow. Unlike `GradScaler`, a step with an overflow is repeated with the
//! lower scale, not skipped, so no data is lost.

use candle_core::DType;
use serde::{Deserialize, Serialize};

/// Initial scale if `memory.scale` is not set.
const FIRST: u64 = 65_536;
/// Upper limit: times the smallest f16 number, the product is 1.
const LARGEST: f64 = 16_777_216.0;
/// Number of steps without overflow before the scale doubles.
const PATIENCE: u32 = 2_000;

/// Loss scale, and the number of steps since the last change.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    factor: f64,
    steps: u32,
}

impl LossScale {
    /// Initial scale, from `memory.scale` if set; `None` for dtypes other than f16.
    pub fn new(dtype: DType, first: Option<u64>) -> Option<Self> {
        let factor = first.unwrap_or(FIRST) as f64;
        (dtype == DType::F16).then_some(Self { factor: factor.clamp(1.0, LARGEST), steps: 0 })
    }

    /// Factor on the loss.
    pub fn factor(self) -> f64 {
        self.factor
    }

    /// Returns the scale after an overflow; `None` if it is already 1.
    pub fn after_overflow(self) -> Option<Self> {
        (self.factor > 1.0).then_some(Self { factor: (self.factor / 2.0).max(1.0), steps: 0 })
    }

    /// Returns the scale after a step without overflow.
    pub fn after_step(self) -> Self {
        match self.steps + 1 {
            PATIENCE => Self { factor: (2.0 * self.factor).min(LARGEST), steps: 0 },
            steps => Self { steps, ..self },
        }
    }

    /// Returns true for values within the limits, to validate checkpoints.
    pub fn is_sound(self) -> bool {
        (1.0..=LARGEST).contains(&self.factor) && self.steps < PATIENCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_scale_grows_after_patience_and_falls_at_once() {
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
