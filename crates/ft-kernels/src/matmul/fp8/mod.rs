//! Products with frozen weights in 8-bit floats, on CUDA.
//!
//! Forward `y = x W^T` with both operands in e4m3, backward `dx = dy W` with the gradient in e5m2: gradients span more
//! binades than activations, and tokens that are no targets have small ones (Transformer Engine's hybrid recipe). Sums
//! are f32, results bf16. Scales come from the values of the product itself, not from those of earlier steps. The
//! weight has one scale. Rows of `x` and `dy` have one each where cuBLASLt takes that (compute capability 9.0 with CUDA
//! 12.9 or later), so that a token does not depend on the others; elsewhere one for all.
//!
//! A weight stays as it is stored, dense or in 4-bit blocks, and is cast for each product: 3 bytes of traffic a value.
//! The backward pass casts to a transposed copy, since cards before Blackwell take 8-bit operands by rows of the inner
//! dimension only. Adapters are not part of these products: 3 bits of mantissa lose their small updates.
//!
//! A product takes 4 launches, or 5 with one scale for all rows. Buffers of a product, of outputs `n`, inner size `k`,
//! `t` rows: weight `n k`, its scales `4 n`, rows `t k`, their scales `4 t`, partial maxima 2 KiB, workspace 32 MiB.
//!
//! | file | purpose |
//! |---|---|
//! | `cuda` | casts and products |
//! | `library` | cuBLASLt |
//! | `fp8.cu` | the casts |

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod library;

use crate::Tensor;
use crate::gemm;
use crate::ledger::{Cost, Role};
use crate::quantized::QuantizedMatrix;
use crate::quantized::tiles::FEW;
use crate::tensor::Ghost;
use candle_core::{DType, Device, Result};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Blocks of the kernels for maxima: same as in fp8.cu.
const PARTS: usize = 512;
/// Workspace of cuBLASLt in bytes, as NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;
/// Rows and columns of a weight are multiples of this.
const UNIT: usize = 16;

/// A frozen weight `[o, i]` as it is stored.
#[derive(Clone, Debug)]
pub enum Source {
    /// In bf16.
    Dense(Tensor),
    /// In 4-bit blocks.
    Blocks(Arc<QuantizedMatrix>),
}

impl Source {
    fn dims(&self) -> (usize, usize) {
        match self {
            Source::Dense(w) => (w.dims()[0], w.dims()[1]),
            Source::Blocks(w) => w.dims(),
        }
    }
}

/// A frozen weight whose products are in 8-bit floats.
#[derive(Clone, Debug)]
pub struct Fp8Matrix {
    source: Source,
}

/// A format of 8-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// 4 bits of exponent, 3 of mantissa; up to 448.
    E4m3,
    /// 5 bits of exponent, 2 of mantissa; up to 57,344.
    E5m2,
}

impl Format {
    /// Largest number.
    pub fn most(self) -> f32 {
        match self {
            Format::E4m3 => 448.0,
            Format::E5m2 => 57_344.0,
        }
    }

    /// The nearest number, to even, or the largest: as the kernels round. A reference for checks.
    pub fn nearest(self, x: f32) -> f32 {
        let (mantissa, least) = match self {
            Format::E4m3 => (3, -6),
            Format::E5m2 => (2, -14),
        };
        let size = x.abs().min(self.most());
        let exponent = (size.to_bits() >> 23).cast_signed() - 127;
        let unit = 2f32.powi(exponent.max(least) - mantissa);
        ((size / unit).round_ties_even() * unit).copysign(x)
    }
}

/// Whether products of 8-bit floats are computed in bf16 for now: see [`exactly`].
static EXACTLY: AtomicBool = AtomicBool::new(false);

/// Runs `f` with products in bf16 in place of 8-bit floats, for comparison.
pub fn exactly<R>(f: impl FnOnce() -> R) -> R {
    struct Until;
    impl Drop for Until {
        fn drop(&mut self) {
            EXACTLY.store(false, Ordering::Relaxed);
        }
    }
    EXACTLY.store(true, Ordering::Relaxed);
    let _until = Until;
    f()
}

/// Whether a weight of this shape takes part: multiples of 16.
pub fn fits((rows, cols): (usize, usize)) -> bool {
    rows.is_multiple_of(UNIT) && cols.is_multiple_of(UNIT)
}

/// Checks the device and cuBLASLt for products of 8-bit floats.
///
/// # Errors
/// The CPU, an older card, a missing library: the reason in words.
pub fn check(device: &Device) -> std::result::Result<(), String> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => library::check(device),
        _ => Err("the run computes on the CPU".into()),
    }
}

/// Whether each row of activations and gradients has a scale of its own on this device; otherwise all have one.
///
/// # Errors
/// cuBLASLt is missing or fails.
pub fn scales_by_row(device: &Device) -> Result<bool> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => library::by_row(device),
        _ => Ok(false),
    }
}

impl Fp8Matrix {
    /// A weight as it is stored.
    ///
    /// # Errors
    /// Not a matrix, or rows or columns that are no multiples of 16.
    pub fn new(source: Source) -> Result<Self> {
        if let Source::Dense(w) = &source {
            w.dims2()?;
        }
        if !fits(source.dims()) {
            candle_core::bail!("fp8: a weight {:?}: no multiples of {UNIT}", source.dims());
        }
        Ok(Self { source })
    }

    /// The stored weight.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// `(o, i)`.
    pub fn dims(&self) -> (usize, usize) {
        self.source.dims()
    }

    /// Whether a product with `x` is in 8-bit floats: on CUDA, in bf16, of more than a few tokens.
    fn takes(&self, x: &Tensor) -> bool {
        let stored = match &self.source {
            Source::Dense(w) => w.dtype(),
            Source::Blocks(w) => w.dtype(),
        };
        let here = match x.ghost() {
            Some(g) => g.ledger().machine().cuda,
            None => self.is_here(x),
        };
        let exactly = EXACTLY.load(Ordering::Relaxed);
        here && !exactly
            && [x.dtype(), stored] == [DType::BF16; 2]
            && x.dims().first().is_some_and(|t| *t > FEW)
    }

    #[cfg(feature = "cuda")]
    fn is_here(&self, x: &Tensor) -> bool {
        let reads = match &self.source {
            Source::Dense(_) => true,
            Source::Blocks(w) => crate::quantized::dequantizes(w),
        };
        reads && x.real().is_ok_and(|x| x.device().is_cuda())
    }

    #[cfg(not(feature = "cuda"))]
    fn is_here(&self, _: &Tensor) -> bool {
        false
    }

    /// Records a product of `x` `[t, inner]`: work, buffers, and the result without `sum`.
    fn ghost(&self, x: &Ghost, back: bool, sum: Option<Tensor>) -> Result<Tensor> {
        let ((t, k), (o, i), l) = (x.shape().dims2()?, self.dims(), x.ledger());
        let n = if back { i } else { o };
        let (values, flops) = ((o * i) as f64, 2.0 * (t * o * i) as f64);
        // the source is read for its maximum and for the cast, the copy written and read
        let (dequantized, read) = match &self.source {
            Source::Dense(_) => (0.0, 6.0 * values),
            Source::Blocks(_) => (values, values),
        };
        let moved = 3.0 * (t * k) as f64;
        l.work(Cost { flops, fp8: flops, dequantized, read, moved, started: 4.0, ..Cost::default() });
        let _weight = l.role(Role::InFlight, || l.hold((o * i) as u64));
        let held = [4 * PARTS, 4 * n, t * k, 4 * t, WORKSPACE].map(|bytes| l.hold(bytes as u64));
        let out = sum.unwrap_or_else(|| Ghost::new(l, (t, n), x.dtype).into());
        drop(held);
        Ok(out)
    }

    /// `x W^T`: `[t, i]` -> `[t, o]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if self.takes(x) {
            if let Some(x) = x.ghost() {
                return self.ghost(x, false, None);
            }
            #[cfg(feature = "cuda")]
            return cuda::product(&self.source, false, x, None);
        }
        match &self.source {
            Source::Dense(w) => gemm::matmul(x, false, w, true),
            Source::Blocks(w) => w.forward(x),
        }
    }

    /// `dy W`: `[t, o]` -> `[t, i]`, added to `dx` if given.
    pub fn backward(&self, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
        if self.takes(dy) {
            if let Some(dy) = dy.ghost() {
                return self.ghost(dy, true, dx);
            }
            #[cfg(feature = "cuda")]
            return cuda::product(&self.source, true, dy, dx);
        }
        match (&self.source, dx) {
            (Source::Blocks(w), dx) => w.backward(dy, dx),
            (Source::Dense(w), None) => gemm::matmul(dy, false, w, false),
            (Source::Dense(w), Some(dx)) => {
                gemm::matmul_acc(&dx, dy, false, w, false, 1.0)?;
                Ok(dx)
            }
        }
    }

    /// `W A^T`, exact: `[i, r]` -> `[o, r]`, for A `[r, i]`.
    pub fn times(&self, a: &Tensor) -> Result<Tensor> {
        match &self.source {
            Source::Dense(w) => gemm::matmul(w, false, a, true),
            Source::Blocks(w) => w.times(a),
        }
    }

    /// Rows in the compute dtype.
    pub fn rows(&self, rows: Range<usize>) -> Result<Tensor> {
        match &self.source {
            Source::Dense(w) => w.narrow(0, rows.start, rows.len()),
            Source::Blocks(w) => w.dequantize_rows(rows),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_format_stay_and_others_go_to_the_nearest() {
        for (format, all) in [
            (Format::E4m3, [1.125, 448.0, 1.0 / 512.0, -0.875, 0.0]),
            (Format::E5m2, [1.25, 57_344.0, 1.0 / 65_536.0, -0.875, 0.0]),
        ] {
            assert!(all.iter().all(|x| format.nearest(*x) == *x), "{format:?}");
        }
        // ties to even, the largest, subnormals
        let e4m3 = |x| Format::E4m3.nearest(x);
        assert_eq!([e4m3(1.0625), e4m3(1.1875), e4m3(1e9), e4m3(-1e9)], [1.0, 1.25, 448.0, -448.0]);
        assert_eq!([e4m3(1.4 / 512.0), e4m3(0.4 / 512.0)], [1.0 / 512.0, 0.0]);
        assert_eq!([Format::E5m2.nearest(1.3), Format::E5m2.nearest(61_440.0)], [1.25, 57_344.0]);
    }

    /// A product of ghosts holds the buffers that the page lists, and computes in 8-bit floats only what takes part.
    #[test]
    fn ghosts_hold_the_buffers_of_a_product() -> Result<()> {
        use crate::ledger::{Ledger, Machine};
        let machine = Machine { cuda: true, width: 2, stored: 2, threads: 1, card: None, fp8: true };
        let (t, o, i) = (24, 32, 48);
        let l = Ledger::new(machine);
        let w = Fp8Matrix::new(Source::Dense(Ghost::weight(&l, (o, i), DType::BF16).into()))?;
        let x = Tensor::from(Ghost::new(&l, (t, i), DType::BF16));
        l.take();
        let y = w.forward(&x)?;
        let taken = l.take();
        let buffers = [o * i, 4 * o, t * i, 4 * t, 2048, 32 << 20, 2 * t * o, 2 * t * i];
        assert_eq!(taken.at_peak.iter().sum::<u64>(), buffers.iter().sum::<usize>() as u64);
        assert_eq!((taken.cost.flops, taken.cost.fp8), (2.0 * (t * o * i) as f64, 2.0 * (t * o * i) as f64));
        let dx = w.backward(&y, Some(x))?;
        assert_eq!(dx.dims(), [t, i]);
        // few tokens, and another dtype
        l.take();
        for (t, dtype) in [(FEW, DType::BF16), (t, DType::F32)] {
            w.forward(&Ghost::new(&l, (t, i), dtype).into())?;
        }
        assert_eq!(l.take().cost.fp8, 0.0);
        assert!(Fp8Matrix::new(Source::Dense(Ghost::weight(&l, (o, 40), DType::BF16).into())).is_err());
        Ok(())
    }
}
