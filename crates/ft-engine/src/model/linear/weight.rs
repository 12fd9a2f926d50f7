//! Matrix of a linear: products for all storage formats.

use candle_core::Result;
use ft_kernels::dequantized::Dequantized;
use ft_kernels::fp8::{Fp8Matrix, Source};
use ft_kernels::padded::Padded;
use ft_kernels::quantized::QuantizedMatrix;
use ft_kernels::{Tensor, gemm, upcast};
use std::ops::Range;
use std::sync::Arc;

/// Frozen or trained matrix of a linear, `[o, i]`.
#[derive(Clone, Debug)]
pub enum Weight {
    /// Values in the compute dtype, or in half precision if frozen: see [`gemm::kept`].
    Dense(Tensor),
    /// Dense values on CUDA with spare columns and rows for an adapter, so that one product computes both.
    Padded(Padded),
    /// Frozen 4-bit codes in blocks (NF4 or FP4), dequantized in every product.
    Nf4(Arc<QuantizedMatrix>),
    /// 4-bit matrix dequantized for one visit of the walk: see [`super::Linear::dequantized`].
    Dequantized(Arc<Dequantized>),
    /// Frozen, multiplied in 8-bit floats (`memory.products`).
    Fp8(Fp8Matrix),
}

/// Error for a bug in the model.
const NO_ROOM: &str = "a product with an adapter and a matrix without room for it";

impl Weight {
    /// A matrix without room for an adapter, multiplied in 8-bit floats if `fp8`.
    ///
    /// # Errors
    /// A matrix that cannot be multiplied in 8-bit floats.
    pub fn of(source: Source, fp8: bool) -> Result<Self> {
        Ok(match source {
            source if fp8 => Weight::Fp8(Fp8Matrix::new(source)?),
            Source::Dense(w) => Weight::Dense(w),
            Source::Blocks(w) => Weight::Nf4(w),
        })
    }

    /// `x W^T`: `[t, i]` -> `[t, o]`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Weight::Dense(w) => gemm::matmul(x, false, w, true),
            Weight::Padded(w) => gemm::matmul(x, false, &w.values()?, true),
            Weight::Nf4(w) => w.forward(x),
            Weight::Dequantized(w) => w.forward(x),
            Weight::Fp8(w) => w.forward(x),
        }
    }

    /// `dy W`: `[t, o]` -> `[t, i]`, added to `dx` if given.
    pub(super) fn backward(&self, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
        let w = match self {
            Weight::Nf4(w) => return w.backward(dy, dx),
            Weight::Dequantized(w) => return w.backward(dy, dx),
            Weight::Fp8(w) => return w.backward(dy, dx),
            Weight::Dense(w) => w,
            Weight::Padded(w) => &w.values()?,
        };
        match dx {
            None => gemm::matmul(dy, false, w, false),
            Some(dx) => {
                gemm::matmul_acc(&dx, dy, false, w, false, 1.0)?;
                Ok(dx)
            }
        }
    }

    /// Whether products with operands like `x` can be fused with an adapter's: [`Weight::forward_with`] and
    /// [`Weight::backward_with`].
    pub(super) fn merges(&self, x: &Tensor, rank: usize) -> bool {
        let room = |w: &Padded| w.room().min(w.room_below()) >= rank && w.dtype() == x.dtype();
        match self {
            Weight::Dense(_) | Weight::Fp8(_) => false,
            Weight::Padded(w) => room(w),
            Weight::Nf4(w) => w.merges(x),
            Weight::Dequantized(w) => room(w.room()),
        }
    }

    /// Fused `x W^T + u B^T` from rows `[x | u]` `[t, i + r]` and `b` `[o, r]`.
    pub(super) fn forward_with(&self, xu: &Tensor, b: &Tensor) -> Result<Tensor> {
        match self {
            Weight::Nf4(w) => w.forward_with(xu, b),
            Weight::Dequantized(w) => w.padded(xu, b)?.forward_with(xu, b),
            Weight::Padded(w) => {
                gemm::work(xu, false, &w.with(b.dim(1)?)?, None)?;
                w.forward_with(xu, b)
            }
            Weight::Dense(_) | Weight::Fp8(_) => candle_core::bail!("{NO_ROOM}"),
        }
    }

    /// Fused `dy W + du A` from rows `[dy | du]` `[t, o + r]` and `a` `[r, i]`, added to `dx` if given.
    pub(super) fn backward_with(&self, dydu: &Tensor, a: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
        match self {
            Weight::Nf4(w) => w.backward_with(dydu, a, dx),
            Weight::Dequantized(w) => w.padded(dydu, a)?.backward_with(dydu, a, dx),
            Weight::Padded(w) => {
                gemm::work(dydu, false, &w.with_below(a.dim(0)?)?, dx.as_ref())?;
                w.backward_with(dydu, a, dx)
            }
            Weight::Dense(_) | Weight::Fp8(_) => candle_core::bail!("{NO_ROOM}"),
        }
    }

    /// `W A^T`: `[o, r]` for A `[r, i]`.
    pub(super) fn times(&self, a: &Tensor) -> Result<Tensor> {
        match self {
            // On the CPU, a half-precision W must be the right operand; the result has the same bits as in
            // the other order.
            Weight::Dense(w) if w.device().is_cpu() => gemm::matmul(a, false, w, true)?.t()?.contiguous(),
            Weight::Dense(w) => gemm::matmul(w, false, a, true),
            Weight::Padded(w) => gemm::matmul(&w.values()?, false, a, true),
            Weight::Nf4(w) => w.times(a),
            Weight::Dequantized(w) => w.times(a),
            Weight::Fp8(w) => w.times(a),
        }
    }

    /// Squared norm of every row, `[o]`, f32.
    pub fn row_squares(&self) -> Result<Tensor> {
        match self {
            Weight::Dense(w) => row_squares(w),
            Weight::Padded(w) => row_squares(&w.values()?),
            Weight::Nf4(w) => w.row_squares(),
            Weight::Dequantized(w) => w.blocks().row_squares(),
            Weight::Fp8(w) => match w.source() {
                Source::Dense(w) => row_squares(w),
                Source::Blocks(w) => w.row_squares(),
            },
        }
    }

    /// A range of rows `[rows, i]` in the stored dtype; in the compute dtype for 4-bit matrices.
    pub fn rows(&self, rows: Range<usize>) -> Result<Tensor> {
        match self {
            Weight::Dense(w) => w.narrow(0, rows.start, rows.len()),
            Weight::Padded(w) => w.values()?.narrow(0, rows.start, rows.len()),
            Weight::Nf4(w) => w.dequantize_rows(rows),
            Weight::Dequantized(w) => w.values()?.narrow(0, rows.start, rows.len()),
            Weight::Fp8(w) => w.rows(rows),
        }
    }

    /// Shape `[o, i]`.
    pub fn dims(&self) -> Result<(usize, usize)> {
        match self {
            Weight::Dense(w) => w.dims2(),
            Weight::Padded(w) => Ok(w.dims()),
            Weight::Nf4(w) => Ok(w.dims()),
            Weight::Dequantized(w) => Ok(w.blocks().dims()),
            Weight::Fp8(w) => Ok(w.dims()),
        }
    }

    /// A copy of the matrix, dequantized if 4-bit, with spare columns for an adapter of `rank`. Products
    /// are bit-identical and skip dequantization; the values stay in memory until the copy is dropped.
    pub(super) fn dequantized(&self, rank: usize) -> Result<Weight> {
        match self {
            Weight::Nf4(w) => Ok(Weight::Dequantized(Arc::new(Dequantized::new(Arc::clone(w), rank)?))),
            other => Ok(other.clone()),
        }
    }
}

/// Values squared at a time.
const PIECE: usize = 1 << 20;

fn row_squares(w: &Tensor) -> Result<Tensor> {
    let (o, i) = w.dims2()?;
    let rows = (PIECE / i.max(1)).max(1);
    let part = |r: usize| upcast(&w.narrow(0, r, rows.min(o - r))?)?.sqr()?.sum(1);
    Tensor::cat(&(0..o).step_by(rows).map(part).collect::<Result<Vec<_>>>()?, 0)
}
