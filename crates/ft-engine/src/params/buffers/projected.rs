//! GaLore's optimizer state (Zhao et al., 2024): moments of a low-rank projection of a matrix's gradient G
//! `[o, i]` onto r directions of the shorter side.
//!
//! With o >= i, the basis P `[i, r]` holds the top right singular vectors of a gradient, and the projection
//! is `G P` `[o, r]`. Otherwise P `[o, r]` holds the top left ones, and the projection is `P^T G` `[r, i]`.

use super::moments::{self, Moments, is_large};
use crate::adapters::{Part, Trained};
use candle_core::{DType, Device, Result};
use ft_kernels::Tensor;
use ft_kernels::gemm;

/// Settings of gradient projection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Projection {
    /// Projection rank; 0 disables projection.
    pub rank: usize,
    /// Whether the moments of large projections are in 8 bits.
    pub eight_bit: bool,
}

impl Projection {
    /// Whether a tensor's gradient is projected: a matrix of a decoder layer, trained in full, with both
    /// sides longer than the rank. `units` counts all units; the first and the last are not layers.
    pub fn takes(self, part: Part, shape: &[usize], unit: usize, units: usize) -> bool {
        let &[o, i] = shape else { return false };
        self.rank > 0
            && part == Part::Weight
            && (1..units.saturating_sub(1)).contains(&unit)
            && o.min(i) > self.rank
    }

    /// As [`Projection::takes`], for a trained tensor.
    pub fn takes_tensor(self, t: &Trained, units: usize) -> bool {
        self.takes(t.part, &t.shape, t.unit, units)
    }

    /// Shapes of the state of a matrix `[o, i]`.
    pub fn shapes(self, (o, i): (usize, usize)) -> Shapes {
        let low = if o >= i { (o, self.rank) } else { (self.rank, i) };
        let coded = self.eight_bit && is_large(low.0 * low.1);
        Shapes { low, basis: (o.min(i), self.rank), coded }
    }

    /// State bytes of a matrix: the basis and two moments.
    pub fn bytes(self, dims: (usize, usize)) -> u64 {
        let Shapes { low, basis, coded } = self.shapes(dims);
        let low = low.0 * low.1;
        let moments = if coded { moments::bytes(low) } else { 8 * low as u64 };
        4 * (basis.0 * basis.1) as u64 + moments
    }
}

/// Shapes of the GaLore state of one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shapes {
    /// The projection.
    pub low: (usize, usize),
    /// The basis.
    pub basis: (usize, usize),
    /// Whether moments are in 8 bits.
    pub coded: bool,
}

/// GaLore state of one matrix.
#[derive(Debug)]
pub struct Projected {
    /// Index among the trained tensors.
    pub index: usize,
    /// Rows and columns.
    pub dims: (usize, usize),
    /// Rows and columns of the projection.
    pub low: (usize, usize),
    /// Basis `[min(o, i), r]`, f32.
    pub basis: Tensor,
    /// Moments of the flattened projection.
    pub moments: Moments,
}

impl Projected {
    /// Zero-filled state.
    pub(crate) fn new(index: usize, dims: (usize, usize), how: Projection, device: &Device) -> Result<Self> {
        let Shapes { low, basis, coded } = how.shapes(dims);
        let len = low.0 * low.1;
        let basis = Tensor::zeros(basis, DType::F32, device)?;
        let moments = Moments::new(&(0..len), if coded { len } else { 0 }, device)?;
        Ok(Self { index, dims, low, basis, moments })
    }

    /// Whether the projection is from the right, preserving the rows.
    pub fn is_right(&self) -> bool {
        self.dims.0 >= self.dims.1
    }

    /// Projects a gradient `[o, i]`.
    ///
    /// # Errors
    /// Device errors.
    pub fn project(&self, g: &Tensor) -> Result<Tensor> {
        match self.is_right() {
            true => gemm::matmul(g, false, &self.basis, false),
            false => gemm::matmul(&self.basis, true, g, false),
        }
    }

    /// Projects an update back and adds it, times `scale`, to a matrix `[o, i]`.
    ///
    /// # Errors
    /// Device errors.
    pub fn add_back(&self, to: &Tensor, low: &Tensor, scale: f64) -> Result<()> {
        match self.is_right() {
            true => gemm::matmul_acc(to, low, false, &self.basis, true, scale),
            false => gemm::matmul_acc(to, &self.basis, false, low, false, scale),
        }
    }
}
