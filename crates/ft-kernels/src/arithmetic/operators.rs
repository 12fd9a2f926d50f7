//! Arithmetic operators of tensors.

use crate::Tensor;
use candle_core::Result;
use std::borrow::Borrow;

macro_rules! operator {
    ($trait:ident, $name:ident, $mul:expr, $add:expr) => {
        impl<B: Borrow<Tensor>> std::ops::$trait<B> for Tensor {
            type Output = Result<Tensor>;
            fn $name(self, other: B) -> Self::Output {
                Tensor::$name(&self, other.borrow())
            }
        }
        impl<B: Borrow<Tensor>> std::ops::$trait<B> for &Tensor {
            type Output = Result<Tensor>;
            fn $name(self, other: B) -> Self::Output {
                Tensor::$name(self, other.borrow())
            }
        }
        impl std::ops::$trait<f64> for Tensor {
            type Output = Result<Tensor>;
            fn $name(self, x: f64) -> Self::Output {
                self.affine($mul(x), $add(x))
            }
        }
        impl std::ops::$trait<f64> for &Tensor {
            type Output = Result<Tensor>;
            fn $name(self, x: f64) -> Self::Output {
                self.affine($mul(x), $add(x))
            }
        }
    };
}

operator!(Add, add, |_| 1.0, |x| x);
operator!(Sub, sub, |_| 1.0, |x: f64| -x);
operator!(Mul, mul, |x| x, |_| 0.0);
operator!(Div, div, |x: f64| 1.0 / x, |_| 0.0);

impl std::ops::Sub<&Tensor> for f64 {
    type Output = Result<Tensor>;
    fn sub(self, t: &Tensor) -> Self::Output {
        t.affine(-1.0, self)
    }
}
