//! Products with 4-bit matrices, and their dequantization, by device.

use super::cpu::{backward_cpu, dequantize_cpu, forward_cpu, row_squares_cpu};
#[cfg(feature = "cuda")]
use super::cuda;
use super::matrix::QuantizedMatrix;
use super::tiles;
use crate::Tensor;
use crate::cpu::{is_native, on_real};
use crate::gemm;
use crate::ledger::{Cost, Role};
use crate::padded::{self, Padded};
use crate::tensor::{Ghost, started};
use candle_core::{DType, Result};
use std::ops::Range;

/// The ghost, in a plan for CUDA.
fn on_cuda(t: &Tensor) -> Option<&Ghost> {
    t.ghost().filter(|g| g.ledger().machine().cuda)
}

impl QuantizedMatrix {
    /// Records the FLOPs and traffic of a product with `x` (ghosts only); `dequantized` tells whether the
    /// product dequantizes.
    pub fn work(&self, x: &Tensor, dequantizes: bool) {
        let Some(g) = x.ghost() else { return };
        let n = (self.rows * self.cols) as f64;
        let rows = x.dims().first().copied().unwrap_or(0) as f64;
        let (dequantized, read) =
            (if dequantizes { n } else { 0.0 }, n * self.compute.size_in_bytes() as f64);
        g.ledger().work(Cost { flops: 2.0 * rows * n, dequantized, read, ..Cost::default() });
    }

    /// Records a tiled product [t, from] -> [t, to] on CUDA: the tile buffer (`size` is the matrix's number of
    /// values) and, without `sum`, the result.
    fn ghost_cuda(&self, x: &Ghost, to: usize, size: usize, sum: Option<Tensor>) -> Result<Tensor> {
        let (t, l) = (x.layout.dim(0)?, x.ledger());
        let tile = (size * self.compute.size_in_bytes()).min(tiles::bytes(t, None));
        started(l);
        let _tile = l.role(Role::InFlight, || l.hold(tile as u64));
        Ok(sum.unwrap_or_else(|| Ghost::new(l, (t, to), x.dtype).into()))
    }

    /// Whether a single product can sum over this matrix and an adapter, given the dtype of `x`.
    pub fn merges(&self, x: &Tensor) -> bool {
        if let Some(g) = x.ghost() {
            return g.ledger().machine().cuda && x.dtype() == self.compute;
        }
        #[cfg(feature = "cuda")]
        return cuda::multiplies(self, x);
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// `x W^T`: [t, cols] -> [t, rows], in `x`'s dtype.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.work(x, true);
        if is_native(x) {
            return on_real!(x.dtype(), forward_cpu(self, x));
        }
        if let Some(x) = on_cuda(x) {
            return self.ghost_cuda(x, self.rows, self.rows * self.cols, None);
        }
        #[cfg(feature = "cuda")]
        if cuda::multiplies(self, x) {
            return cuda::forward(self, x, None);
        }
        x.matmul(&self.dequantize()?.to_dtype(x.dtype())?.t()?)
    }

    /// `x W^T + u B^T` in one product, for rows `[x | u]` [t, cols + r] and `b` [rows, r]. Requires
    /// [merges](Self::merges).
    pub fn forward_with(&self, xu: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.work(xu, true);
        gemm::work(&xu.narrow(1, self.cols, b.dim(1)?)?, false, b, None)?;
        let size = self.rows * padded::stride(self.cols, b.dim(1)?);
        if let Some(xu) = on_cuda(xu) {
            return self.ghost_cuda(xu, self.rows, size, None);
        }
        #[cfg(feature = "cuda")]
        return cuda::forward(self, xu, Some(b));
        #[cfg(not(feature = "cuda"))]
        candle_core::bail!("4-bit blocks: a product of another device")
    }

    /// `dy W + du A` in one product, for rows `[dy | du]` [t, rows + r] and `a` [r, cols], added to `dx`
    /// if given. Requires [merges](Self::merges).
    pub fn backward_with(&self, dydu: &Tensor, a: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
        self.work(dydu, true);
        gemm::work(&dydu.narrow(1, self.rows, a.dim(0)?)?, false, a, None)?;
        let size = (self.rows + a.dim(0)?) * self.cols;
        if let Some(dydu) = on_cuda(dydu) {
            return self.ghost_cuda(dydu, self.cols, size, dx);
        }
        #[cfg(feature = "cuda")]
        return cuda::backward(self, dydu, Some(a), dx);
        #[cfg(not(feature = "cuda"))]
        candle_core::bail!("4-bit blocks: a product of another device")
    }

    /// `dy W`, added to `dx` if given: [t, rows] -> [t, cols], in `dy`'s dtype.
    pub fn backward(&self, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
        self.work(dy, true);
        if is_native(dy) {
            return on_real!(dy.dtype(), backward_cpu(self, dy, dx));
        }
        if let Some(dy) = on_cuda(dy) {
            return self.ghost_cuda(dy, self.cols, self.rows * self.cols, dx);
        }
        #[cfg(feature = "cuda")]
        if cuda::multiplies(self, dy) {
            return cuda::backward(self, dy, None, dx);
        }
        let add = dy.matmul(&self.dequantize()?.to_dtype(dy.dtype())?)?;
        match dx {
            None => Ok(add),
            Some(dx) => dx + add,
        }
    }

    /// `W A^T`: [r, cols] -> [rows, r], in `a`'s dtype.
    pub fn times(&self, a: &Tensor) -> Result<Tensor> {
        self.forward(a)?.t()?.contiguous()
    }

    /// Squared norm of each row `[rows]`, in f32 (f64 if the compute dtype is f64).
    pub fn row_squares(&self) -> Result<Tensor> {
        if is_native(&self.packed) {
            return on_real!(self.compute, row_squares_cpu(self));
        }
        let parts = tiles::split(self.rows, self.cols * DType::F32.size_in_bytes(), tiles::MOST)
            .map(|rows| self.dequantize_rows(rows)?.to_dtype(DType::F32)?.sqr()?.sum(1))
            .collect::<Result<Vec<_>>>()?;
        Tensor::cat(&parts, 0)
    }

    /// The dequantized matrix [rows, cols] in the compute dtype.
    pub fn dequantize(&self) -> Result<Tensor> {
        self.dequantize_rows(0..self.rows)
    }

    /// Dequantized rows, in the compute dtype.
    pub fn dequantize_rows(&self, rows: Range<usize>) -> Result<Tensor> {
        if rows.start > rows.end || rows.end > self.rows {
            candle_core::bail!("4-bit blocks: rows {rows:?} of {}", self.rows);
        }
        if is_native(&self.packed) {
            return on_real!(self.compute, dequantize_cpu(self, rows));
        }
        if let Some(g) = on_cuda(&self.packed) {
            return Ok(Ghost::new(g.ledger(), (rows.len(), self.cols), self.compute).into());
        }
        #[cfg(feature = "cuda")]
        if cuda::dequantizes(self) {
            return cuda::dequantize(self, rows, (0, self.cols));
        }
        self.dequantize_composed(rows)
    }

    /// The dequantized matrix, padded for an adapter of LoRA rank `rank` if a single product can multiply
    /// both.
    pub fn dequantize_padded(&self, rank: usize) -> Result<Padded> {
        let (shape, dims) = (Padded::shape((self.rows, self.cols), rank), (self.rows, self.cols));
        if let Some(g) = on_cuda(&self.packed) {
            return Padded::within(Ghost::new(g.ledger(), shape, self.compute).into(), dims);
        }
        #[cfg(feature = "cuda")]
        if rank > 0 && cuda::dequantizes(self) {
            return Padded::within(cuda::dequantize(self, 0..self.rows, (rank, shape.1))?, dims);
        }
        Padded::of(&self.dequantize()?)
    }
}
