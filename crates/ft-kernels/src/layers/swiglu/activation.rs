//! Functions of the gate, and the places of gate and up projection in a joint row.

use crate::cpu::Float;

/// Function of the gate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`.
    #[default]
    Silu,
    /// `gelu(gate) * up`, with the tanh approximation of GELU (Hendrycks and Gimpel, 2016).
    GeluTanh,
    /// `g sigmoid(alpha g) (u + 1)`, with `g = min(gate, limit)` and u = up within -limit and limit (gpt-oss).
    Clamped { alpha: f64, limit: f64 },
    /// `sigmoid(gate) * up`: see [`crate::gate`].
    Sigmoid,
}

/// Order of gate and up in a row that holds both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Joint {
    /// All of the gate, then all of up.
    #[default]
    Halves,
    /// In turns.
    Interleaved,
}

impl Joint {
    /// Distance of neighbors, and of up from its gate, in a row of `2 f` values.
    pub fn places(self, f: usize) -> (usize, usize) {
        match self {
            Joint::Halves => (1, f),
            Joint::Interleaved => (2, 1),
        }
    }
}

/// Elementwise part of a gated feed-forward.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Glu {
    pub activation: Activation,
    /// Order in joint rows.
    pub joint: Joint,
}

/// Value and derivatives of an activation.
pub(super) trait Function<T> {
    /// Output for a gate and an up projection.
    fn value(&self, gate: T, up: T) -> T;
    /// Derivatives by gate and by up.
    fn slopes(&self, gate: T, up: T) -> (T, T);
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn logistic<T: Float>(x: T) -> T {
    T::one() / (T::one() + (-x).exp())
}

/// [`Activation::Silu`].
pub(super) struct Silu;

impl<T: Float> Function<T> for Silu {
    #[inline(always)]
    fn value(&self, g: T, u: T) -> T {
        g * logistic(g) * u
    }
    #[inline(always)]
    fn slopes(&self, g: T, u: T) -> (T, T) {
        let s = logistic(g);
        (u * s * (T::one() + g * (T::one() - s)), g * s)
    }
}

/// `sqrt(8 / pi)`: `(1 + tanh(z)) / 2` is `sigmoid(2 z)`.
pub(super) const TANH_SCALE: f64 = 1.595_769_121_605_731;
/// Factor of the cube.
pub(super) const CUBE: f64 = 0.044_715;

/// [`Activation::GeluTanh`].
pub(super) struct GeluTanh;

impl<T: Float> Function<T> for GeluTanh {
    #[inline(always)]
    fn value(&self, g: T, u: T) -> T {
        g * logistic(T::of(TANH_SCALE) * (g + T::of(CUBE) * g * g * g)) * u
    }
    #[inline(always)]
    fn slopes(&self, g: T, u: T) -> (T, T) {
        let (scale, cube) = (T::of(TANH_SCALE), T::of(CUBE));
        let s = logistic(scale * (g + cube * g * g * g));
        let inner = scale * (T::one() + T::of(3.0) * cube * g * g);
        (u * s * (T::one() + g * (T::one() - s) * inner), g * s)
    }
}

/// [`Activation::Clamped`].
pub(super) struct Clamped<T> {
    pub(super) alpha: T,
    pub(super) limit: T,
}

impl<T: Float> Clamped<T> {
    /// Clamped gate and up, and the logistic function of the gate.
    #[inline(always)]
    fn parts(&self, g: T, u: T) -> (T, T, T) {
        let g = if g > self.limit { self.limit } else { g };
        let u = if u > self.limit { self.limit } else { u };
        let u = if u < -self.limit { -self.limit } else { u };
        (g, u, logistic(self.alpha * g))
    }
}

impl<T: Float> Function<T> for Clamped<T> {
    #[inline(always)]
    fn value(&self, g: T, u: T) -> T {
        let (g, u, s) = self.parts(g, u);
        (u + T::one()) * g * s
    }
    #[inline(always)]
    fn slopes(&self, gate: T, up: T) -> (T, T) {
        let (g, u, s) = self.parts(gate, up);
        let of_gate = (u + T::one()) * s * (T::one() + self.alpha * g * (T::one() - s));
        let of_up = g * s;
        let inside = |x: T| !(x > self.limit || x < -self.limit);
        (if gate > self.limit { T::zero() } else { of_gate }, if inside(up) { of_up } else { T::zero() })
    }
}

/// [`Activation::Sigmoid`].
pub(super) struct Sigmoid;

impl<T: Float> Function<T> for Sigmoid {
    #[inline(always)]
    fn value(&self, g: T, u: T) -> T {
        logistic(g) * u
    }
    #[inline(always)]
    fn slopes(&self, g: T, u: T) -> (T, T) {
        let s = logistic(g);
        (u * s * (T::one() - s), s)
    }
}

/// Evaluates an expression with the [`Function`] of an activation.
macro_rules! with_function {
    ($activation:expr, $f:ident => $body:expr) => {
        match $activation {
            $crate::swiglu::Activation::Silu => {
                let $f = $crate::layers::swiglu::activation::Silu;
                $body
            }
            $crate::swiglu::Activation::GeluTanh => {
                let $f = $crate::layers::swiglu::activation::GeluTanh;
                $body
            }
            $crate::swiglu::Activation::Sigmoid => {
                let $f = $crate::layers::swiglu::activation::Sigmoid;
                $body
            }
            $crate::swiglu::Activation::Clamped { alpha, limit } => {
                let $f =
                    $crate::layers::swiglu::activation::Clamped { alpha: T::of(alpha), limit: T::of(limit) };
                $body
            }
        }
    };
}
pub(super) use with_function;
