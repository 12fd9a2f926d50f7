//! Element types of CPU kernels, and sums in lanes.

use candle_core::CpuStorage;
use half::{bf16, f16};

/// Element types that kernels can modify in place.
pub trait Value: candle_core::WithDType {
    /// The vector of a CPU storage, if the type matches.
    fn storage_mut(s: &mut CpuStorage) -> Option<&mut Vec<Self>>;
}

macro_rules! values {
    ($($t:ty: $vector:ident),*) => {
        $(impl Value for $t {
            fn storage_mut(s: &mut CpuStorage) -> Option<&mut Vec<Self>> {
                if let CpuStorage::$vector(v) = s { Some(v) } else { None }
            }
        })*
    };
}
values!(f64: F64, f32: F32, bf16: BF16, f16: F16, u8: U8);

/// Floating-point types of kernel arithmetic.
pub trait Float: Value + std::iter::Sum + std::ops::Neg<Output = Self> {
    /// e^x
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Converts from f64, rounding to nearest.
    fn of(x: f64) -> Self {
        Self::from_f64(x)
    }
    /// Converts from f32, exactly.
    fn widened(x: f32) -> Self {
        Self::of(f64::from(x))
    }
    /// Negative infinity.
    fn lowest() -> Self {
        Self::of(f64::NEG_INFINITY)
    }
    /// Looks up 4-bit codes in a table of 16 values, as far as a fast path exists;
    /// returns the number of values written.
    fn look_up(_packed: &[u8], _values: &[Self; 16], _out: &mut [Self]) -> usize {
        0
    }
}

/// e^x in f32 within 2 ulp, in a form that compilers vectorize: range reduction by ln 2 and
/// the polynomial of Cephes' `expf`. Results below the smallest normal number are clamped near
/// it; +infinity and NaN propagate.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it rounds to an integer, stored in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let low = if x < -87.336_54 { -87.336_54 } else { x };
    let shifted = low * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = low - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4 * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let y = p * r * r + r + 1.0;
    // 2^n as two factors, since n may be 128 with a finite e^x
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let power = |k: i32| f32::from_bits((k.wrapping_add(127) as u32) << 23);
    let y = y * power(half) * power(n.wrapping_sub(half));
    if x > 88.722_83 { f32::INFINITY } else { y }
}

/// Sum in sixteen lanes: vectorizable, and more accurate than a single running sum.
#[inline(always)]
pub fn sum<T: Float>(v: &[T]) -> T {
    let mut lanes = [T::zero(); 16];
    let chunks = v.chunks_exact(16);
    let tail: T = chunks.remainder().iter().copied().sum();
    for c in chunks {
        for i in 0..16 {
            lanes[i] += c[i];
        }
    }
    lanes.into_iter().sum::<T>() + tail
}

/// Maximum, ignoring NaN; the lowest value for an empty slice.
#[inline(always)]
pub fn max<T: Float>(v: &[T]) -> T {
    let bigger = |a: T, b: T| if b > a { b } else { a };
    let mut lanes = [T::lowest(); 16];
    let chunks = v.chunks_exact(16);
    let tail = chunks.remainder().iter().copied().fold(T::lowest(), bigger);
    for c in chunks {
        for i in 0..16 {
            lanes[i] = bigger(lanes[i], c[i]);
        }
    }
    lanes.into_iter().fold(tail, bigger)
}

impl Float for f32 {
    #[inline(always)]
    fn exp(self) -> Self {
        exp_f32(self)
    }
    #[inline(always)]
    fn widened(x: f32) -> Self {
        x
    }
    #[inline]
    fn ln(self) -> Self {
        f32::ln(self)
    }
    #[inline]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }
    #[inline]
    fn look_up(packed: &[u8], values: &[f32; 16], out: &mut [f32]) -> usize {
        super::lookup::f32s(packed, values, out)
    }
}

impl Float for f64 {
    #[inline]
    fn exp(self) -> Self {
        f64::exp(self)
    }
    #[inline]
    fn ln(self) -> Self {
        f64::ln(self)
    }
    #[inline]
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }
}

/// Dot product in sixteen lanes: vectorizable, and more accurate than a single running sum.
#[inline(always)]
pub fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::zero(); 16];
    let (ac, bc) = (a.chunks_exact(16), b.chunks_exact(16));
    let tail: T = ac.remainder().iter().zip(bc.remainder()).map(|(x, y)| *x * *y).sum();
    for (x, y) in ac.zip(bc) {
        for i in 0..16 {
            lanes[i] += x[i] * y[i];
        }
    }
    lanes.into_iter().sum::<T>() + tail
}

/// Calls `$f::<f64>(..)` (a function or a method) for f64 tensors and `$f::<f32>(..)` for all other dtypes.
macro_rules! on_real {
    ($dtype:expr, $($f:ident)::+($($arg:expr),* $(,)?)) => {
        if $dtype == candle_core::DType::F64 { $($f)::+::<f64>($($arg),*) } else { $($f)::+::<f32>($($arg),*) }
    };
    ($dtype:expr, $on:ident.$f:ident($($arg:expr),* $(,)?)) => {
        if $dtype == candle_core::DType::F64 { $on.$f::<f64>($($arg),*) } else { $on.$f::<f32>($($arg),*) }
    };
}
pub(crate) use on_real;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        let mut worst = 0f64;
        for i in -870_000..887_000 {
            let x = i as f32 / 10_000.0;
            let (mine, want) = (f64::from(exp_f32(x)), f64::from(x).exp());
            worst = worst.max((mine - want).abs() / want);
        }
        assert!(worst < 2.5e-7, "{worst:.2e}");
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp_f32(89.0), f32::INFINITY);
        assert!(exp_f32(f32::NEG_INFINITY) < 2e-38 && exp_f32(-1e30) < 2e-38);
        assert!(exp_f32(f32::NAN).is_nan());
    }

    #[test]
    fn sums_and_maxima_cover_every_value() {
        for n in [0, 1, 15, 16, 17, 50] {
            let v: Vec<f64> = (0..n).map(|i| f64::from((i * 7) % 13)).collect();
            assert_eq!(sum(&v), v.iter().sum::<f64>());
            assert_eq!(max(&v), v.iter().copied().fold(f64::NEG_INFINITY, f64::max));
            assert_eq!(dot(&v, &v), v.iter().map(|x| x * x).sum::<f64>());
        }
    }
}
