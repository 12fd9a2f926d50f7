//! The matrix of a linear: its products, whatever it is stored as.

use ft_kernels::dequantized::Dequantized;
use ft_kernels::padded::Padded;
use ft_kernels::quantized::QuantizedMatrix;
use ft_kernels::{Tensor, gemm, upcast};
use candle_core::Result;
use std::ops::Range;
use std::sync::Arc;

/// The frozen or trained matrix of a linear, [o, i].
#[derive(Clone, Debug)]
pub enum Weight {
    /// Values in the compute dtype, or kept in half precision: see [`gemm::kept`].
    Dense(Tensor),
    /// The same on CUDA, with room for an adapter: one product sums both.
    Padded(Padded),
    /// 4-bit codes in blocks (NF4, or FP4), frozen, dequantized in each product.
    Nf4(Arc<QuantizedMatrix>),
    /// The same, dequantized for as long as the walk is at the layer: see [`super::Linear::dequantized`].
    Dequantized(Arc<Dequantized>),
}

impl Weight {
    /// `x W^T`: [t, i] -> [t, o].
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Weight::Dense(w) => gemm::matmul(x, false, w, true),
            Weight::Padded(w) => gemm::matmul(x, false, &w.values()?, true),
            Weight::Nf4(w) => w.forward(x),
            Weight::Dequantized(w) => w.forward(x),
        }
    }

    /// `dy W`, added to `dx` if given: [t, o] -> [t, i].
    pub(super) fn backward(&self, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
        let padded;
        let w = match self {
            Weight::Nf4(w) => return w.backward(dy, dx),
            Weight::Dequantized(w) => return w.backward(dy, dx),
            Weight::Dense(w) => w,
            Weight::Padded(w) => {
                padded = w.values()?;
                &padded
            }
        };
        match dx {
            None => gemm::matmul(dy, false, w, false),
            Some(dx) => {
                gemm::matmul_acc(&dx, dy, false, w, false, 1.0)?;
                Ok(dx)
            }
        }
    }

    /// Whether one product sums those with this matrix and with an adapter's: [`Weight::forward_with`] and
    /// [`Weight::backward_with`], of values like `x`.
    pub(super) fn merges(&self, x: &Tensor, rank: usize) -> bool {
        let room = |w: &Padded| w.room() >= rank && w.dtype() == x.dtype();
        match self {
            Weight::Dense(_) => false,
            Weight::Padded(w) => room(w),
            Weight::Nf4(w) => w.merges(x),
            Weight::Dequantized(w) => room(w.room()),
        }
    }

    /// `x W^T + u B^T` of rows `[x | u]` [t, i + r] and `b` [o, r], in one product.
    pub(super) fn forward_with(&self, xu: &Tensor, b: &Tensor) -> Result<Tensor> {
        match self {
            Weight::Nf4(w) => w.forward_with(xu, b),
            Weight::Dequantized(w) => w.padded(xu, b)?.forward_with(xu, b),
            Weight::Padded(w) => {
                gemm::work(xu, false, &w.with(b.dim(1)?)?, None)?;
                w.forward_with(xu, b)
            }
            Weight::Dense(_) => {
                candle_core::bail!("a product with an adapter and a matrix without room for it")
            }
        }
    }

    /// `dy W + du A` of rows `[dy | du]` [t, o + r] and `a` [r, i], added to `dx` if given, in one product.
    pub(super) fn backward_with(&self, dydu: &Tensor, a: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
        match self {
            Weight::Nf4(w) => w.backward_with(dydu, a, dx),
            Weight::Dequantized(w) => w.padded(dydu, a)?.backward_with(dydu, a, dx),
            Weight::Padded(w) => {
                gemm::work(dydu, false, &w.with_below(a.dim(0)?)?, dx.as_ref())?;
                w.backward_with(dydu, a, dx)
            }
            Weight::Dense(_) => {
                candle_core::bail!("a product with an adapter and a matrix without room for it")
            }
        }
    }

    /// `W A^T`: [o, r] for A [r, i].
    pub(super) fn times(&self, a: &Tensor) -> Result<Tensor> {
        match self {
            // on the CPU the one that may be kept in half precision is the right operand: the bits are the same if it is not
            Weight::Dense(w) if w.device().is_cpu() => gemm::matmul(a, false, w, true)?.t()?.contiguous(),
            Weight::Dense(w) => gemm::matmul(w, false, a, true),
            Weight::Padded(w) => gemm::matmul(&w.values()?, false, a, true),
            Weight::Nf4(w) => w.times(a),
            Weight::Dequantized(w) => w.times(a),
        }
    }

    /// Squared norm of each row, `[o]`, f32.
    pub fn row_squares(&self) -> Result<Tensor> {
        match self {
            Weight::Dense(w) => row_squares(w),
            Weight::Padded(w) => row_squares(&w.values()?),
            Weight::Nf4(w) => w.row_squares(),
            Weight::Dequantized(w) => w.blocks().row_squares(),
        }
    }

    /// Some rows of the matrix [rows, i], as it is kept; of a 4-bit one in the compute dtype.
    pub fn rows(&self, rows: Range<usize>) -> Result<Tensor> {
        match self {
            Weight::Dense(w) => w.narrow(0, rows.start, rows.len()),
            Weight::Padded(w) => w.values()?.narrow(0, rows.start, rows.len()),
            Weight::Nf4(w) => w.dequantize_rows(rows),
            Weight::Dequantized(w) => w.values()?.narrow(0, rows.start, rows.len()),
        }
    }

    /// [o, i].
    pub fn dims(&self) -> Result<(usize, usize)> {
        match self {
            Weight::Dense(w) => w.dims2(),
            Weight::Padded(w) => Ok(w.dims()),
            Weight::Nf4(w) => Ok(w.dims()),
            Weight::Dequantized(w) => Ok(w.blocks().dims()),
        }
    }

    /// The same matrix, dequantized if it is 4-bit, with room for an adapter of `rank`: its products then have the same
    /// bits and dequantize nothing, and its values take memory until it is dropped.
    pub(super) fn dequantized(&self, rank: usize) -> Result<Weight> {
        match self {
            Weight::Nf4(w) => Ok(Weight::Dequantized(Arc::new(Dequantized::new(Arc::clone(w), rank)?))),
            other => Ok(other.clone()),
        }
    }
}

/// Values that are squared at a time.
const PIECE: usize = 1 << 20;

fn row_squares(w: &Tensor) -> Result<Tensor> {
    let (o, i) = w.dims2()?;
    let rows = (PIECE / i.max(1)).max(1);
    let part = |r: usize| upcast(&w.narrow(0, r, rows.min(o - r))?)?.sqr()?.sum(1);
    Tensor::cat(&(0..o).step_by(rows).map(part).collect::<Result<Vec<_>>>()?, 0)
}
