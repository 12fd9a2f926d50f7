//! Hyperparameters, and the sizes of a pass.

/// Elements per task. Constant, to fix the order of sums.
pub(super) const CHUNK: usize = 16 * 1024;

/// Values rounded at once on the CPU.
pub const PIECE: usize = 16 << 20;

/// Hyperparameters of one update.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay rates of the moments.
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Update number, starting at 1.
    pub t: u64,
    /// Factor on the gradient (clipping).
    pub grad_scale: f64,
}

impl AdamW {
    pub(super) fn lr_over_bias(&self) -> f64 {
        self.lr / (1.0 - self.betas[0].powf(self.t as f64))
    }
    pub(super) fn sqrt_bias2(&self) -> f64 {
        (1.0 - self.betas[1].powf(self.t as f64)).sqrt()
    }
}
