//! Learning-rate schedule.

/// A schedule for a run of known length.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    shape: ft_recipe::Schedule,
    min_lr: f64,
    warmup: usize,
    steps: usize,
}

impl Schedule {
    /// Creates the schedule of a recipe for `steps` updates.
    pub fn new(o: &ft_recipe::Optimizer, steps: usize) -> Self {
        Self { shape: o.schedule, min_lr: o.min_lr, warmup: o.warmup(steps), steps }
    }

    /// Learning rate of update `i` (from 0) for the peak rate `lr`: `lr (i + 1) / warmup` during warmup, then
    /// from `lr` at `i = warmup` down to `min_lr` at `i = steps`.
    pub fn at(&self, i: usize, lr: f64) -> f64 {
        if i < self.warmup {
            return lr * (i + 1) as f64 / self.warmup as f64;
        }
        let x = (i - self.warmup) as f64 / (self.steps.saturating_sub(self.warmup)).max(1) as f64;
        let share = match self.shape {
            ft_recipe::Schedule::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * x).cos()),
            ft_recipe::Schedule::Linear => 1.0 - x,
            ft_recipe::Schedule::Constant => return lr,
        };
        self.min_lr + (lr - self.min_lr) * share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(shape: ft_recipe::Schedule, warmup: usize) -> Schedule {
        Schedule { shape, min_lr: 0.1, warmup, steps: 12 }
    }

    #[test]
    fn learning_rates_follow_their_schedule() {
        let c = schedule(ft_recipe::Schedule::Cosine, 2);
        assert_eq!((c.at(0, 1.0), c.at(1, 1.0), c.at(2, 1.0)), (0.5, 1.0, 1.0));
        assert!((c.at(7, 1.0) - 0.55).abs() < 1e-12 && (c.at(12, 1.0) - 0.1).abs() < 1e-12);
        let l = schedule(ft_recipe::Schedule::Linear, 0);
        assert!((l.at(0, 1.0) - 1.0).abs() < 1e-12 && (l.at(6, 1.0) - 0.55).abs() < 1e-12);
        let k = schedule(ft_recipe::Schedule::Constant, 4);
        assert_eq!((k.at(0, 1.0), k.at(3, 1.0), k.at(11, 1.0)), (0.25, 1.0, 1.0));
        // a warmup as long as the run does not divide by zero
        assert!(schedule(ft_recipe::Schedule::Cosine, 12).at(12, 1.0).is_finite());
    }
}
