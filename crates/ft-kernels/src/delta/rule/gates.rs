//! Nonlinearities at the inputs of the recurrence, on the CPU.

use super::EPS;
use crate::cpu::{Float, dot};
use crate::swiglu::logistic;

/// `ln(1 + e^x)`.
pub fn softplus<T: Float>(x: T) -> T {
    let (most, small) = if x > T::zero() { (x, (-x).exp()) } else { (T::zero(), x.exp()) };
    // ln(1 + small) without its cancellation (Kahan)
    let sum = T::one() + small;
    let rest = sum - T::one();
    most + if rest == T::zero() { small } else { sum.ln() * small / rest }
}

/// Decay and rate of a head.
#[derive(Clone, Copy)]
pub struct Gate<T> {
    /// `-exp(a_log)`, and the bias of `a`.
    pub factor: T,
    pub bias: T,
}

impl<T: Float> Gate<T> {
    /// Rate and log-decay of a token.
    pub fn of(self, a: T, b: T) -> (T, T) {
        (logistic(b), self.factor * softplus(a + self.bias))
    }

    /// Gradients of a and b from those of log-decay and rate.
    pub fn back(self, (a, b): (T, T), (d_log, d_rate): (T, T)) -> (T, T) {
        let rate = logistic(b);
        (d_log * self.factor * logistic(a + self.bias), d_rate * rate * (T::one() - rate))
    }
}

/// Writes a vector of unit length, times `scale`; returns the inverse length.
pub fn normalize<T: Float>(x: &[T], scale: T, out: &mut [T]) -> T {
    let inverse = T::one() / (dot(x, x) + T::of(EPS)).sqrt();
    out.iter_mut().zip(x).for_each(|(o, x)| *o = *x * inverse * scale);
    inverse
}

/// Gradient of [`normalize`]: `y` is its output, `dy` the output's gradient, which becomes the input's.
pub fn normalize_back<T: Float>(y: &[T], inverse: T, scale: T, dy: &mut [T]) {
    let along = dot(y, dy) / (scale * scale);
    dy.iter_mut().zip(y).for_each(|(d, y)| *d = inverse * scale * (*d - *y * along));
}
