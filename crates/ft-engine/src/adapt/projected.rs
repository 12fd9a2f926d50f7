//! GaLore's states (Zhao et al., 2024): of a matrix's gradient G [o, i] the moments are those of its projection onto r
//! directions of the shorter side.
//!
//! With o >= i the basis P [i, r] has the largest right singular vectors of a gradient, and the projection is `G P` [o, r];
//! else P [o, r] has the left ones, and it is `P^T G` [r, i].

use super::moments::{self, Moments, is_large};
use super::selection::{Part, Trained};
use ft_kernels::Tensor;
use ft_kernels::gemm;
use candle_core::{DType, Device, Result};

/// How gradients are projected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Projection {
    /// Directions; 0 projects nothing.
    pub rank: usize,
    /// Whether moments of large projections are in 8 bits.
    pub eight_bit: bool,
}

impl Projection {
    /// Whether a tensor's gradient is projected: a matrix of a decoder layer (of `units - 2`) that trains in full, both of
    /// whose sides are longer than the rank.
    pub fn takes(self, part: Part, shape: &[usize], unit: usize, units: usize) -> bool {
        let &[o, i] = shape else { return false };
        self.rank > 0
            && part == Part::Weight
            && (1..units.saturating_sub(1)).contains(&unit)
            && o.min(i) > self.rank
    }

    /// As [`Projection::takes`], of a trained tensor.
    pub fn takes_tensor(self, t: &Trained, units: usize) -> bool {
        self.takes(t.part, &t.shape, t.unit, units)
    }

    /// Bytes of the states of a matrix: the basis, and two moments.
    pub fn bytes(self, (o, i): (usize, usize)) -> u64 {
        let low = self.rank * o.max(i);
        let moments = if self.eight_bit && is_large(low) { moments::bytes(low) } else { 8 * low as u64 };
        4 * (self.rank * o.min(i)) as u64 + moments
    }
}

/// States of one matrix.
#[derive(Debug)]
pub struct Projected {
    /// Which of the trained tensors.
    pub index: usize,
    /// Rows and columns.
    pub dims: (usize, usize),
    rank: usize,
    /// [min(o, i), r], f32.
    pub basis: Tensor,
    /// Of the projection, end to end.
    pub moments: Moments,
}

impl Projected {
    /// Zeros.
    pub(super) fn new(index: usize, dims: (usize, usize), how: Projection, device: &Device) -> Result<Self> {
        let low = how.rank * dims.0.max(dims.1);
        let large = if how.eight_bit && is_large(low) { low } else { 0 };
        let basis = Tensor::zeros((dims.0.min(dims.1), how.rank), DType::F32, device)?;
        Ok(Self { index, dims, rank: how.rank, basis, moments: Moments::new(&(0..low), large, device)? })
    }

    /// Whether the projection is on the right, the rows staying.
    pub fn is_right(&self) -> bool {
        self.dims.0 >= self.dims.1
    }

    /// The sizes of the projection.
    pub fn low(&self) -> (usize, usize) {
        if self.is_right() { (self.dims.0, self.rank) } else { (self.rank, self.dims.1) }
    }

    /// The projection of a gradient [o, i].
    ///
    /// # Errors
    /// Of the device.
    pub fn project(&self, g: &Tensor) -> Result<Tensor> {
        match self.is_right() {
            true => gemm::matmul(g, false, &self.basis, false),
            false => gemm::matmul(&self.basis, true, g, false),
        }
    }

    /// Adds an update of the projection's sizes, times `scale`, to a matrix [o, i].
    ///
    /// # Errors
    /// Of the device.
    pub fn add_back(&self, to: &Tensor, low: &Tensor, scale: f64) -> Result<()> {
        match self.is_right() {
            true => gemm::matmul_acc(to, low, false, &self.basis, true, scale),
            false => gemm::matmul_acc(to, &self.basis, false, low, false, scale),
        }
    }
}
