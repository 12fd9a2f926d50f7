//! Matrices in 4-bit quantization blocks, and products without ever holding the full dequantized matrix.
//!
//! Value `n` (row-major) is `code[c_n] * scale[n / block]`, rounded to the dtype of the original matrix
//! and then to the compute dtype: bit-identical to bitsandbytes. Scales are f32, or with double
//! quantization 8-bit codes of a map, times an absmax per group of scales, plus an offset.
//!
//! | file | purpose |
//! |---|---|
//! | `cpu` | cache-sized tiles, dequantized and multiplied by each thread |
//! | `lookup` | vectorized codebook lookup on the CPU |
//! | `cuda` | L2-sized tiles, dequantized by `dequantize.cu`, multiplied by cuBLAS; `rows.cu` for few tokens |
//! | `tiles` | tiling on a GPU |
//! | `composed` | fallback by candle operations: block sizes other than powers of two, f64 on a GPU |

mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod lookup;
pub mod tiles;

use self::cpu::{backward_cpu, dequantize_cpu, forward_cpu, row_squares_cpu};
pub use self::cpu::{few_tokens, tile_width};
use super::cpu::{is_native, on_real};
use super::gemm;
use super::ledger::{Cost, Ledger, Role};
use super::tensor::Ghost;
use crate::Tensor;
use crate::padded::{self, Padded};
use candle_core::{DType, Device, Result};
use std::ops::Range;
use std::sync::Arc;

/// The 16 code values, shared by all matrices of a model.
#[derive(Debug)]
pub struct Codebook {
    code: [f32; 16],
    /// The two values of each byte [256, 2], f32.
    pairs: Tensor,
}

impl Codebook {
    /// A codebook of 16 values on `device`.
    pub fn new(code: [f32; 16], device: &Device) -> Result<Self> {
        let pairs: Vec<f32> = (0..256usize).flat_map(|b| [code[b >> 4], code[b & 15]]).collect();
        Ok(Self { code, pairs: Tensor::from_vec(pairs, (256, 2), device)? })
    }
}

/// Scales of the quantization blocks.
#[derive(Clone, Debug)]
pub enum Scales {
    /// `[blocks]`, f32.
    Plain(Tensor),
    /// Double quantization: `map[codes[b]] * absmax[b / group] + offset`.
    Nested {
        /// `[blocks]`, u8.
        codes: Tensor,
        /// `[256]`, f32.
        map: Tensor,
        /// `[groups]`, f32.
        absmax: Tensor,
        /// Scales per group.
        group: usize,
        /// Mean of the scales.
        offset: f32,
    },
}

impl QuantizedMatrix {
    /// A shape-only matrix for a plan. Dequantized values have dtype `source`, then `compute`.
    pub fn ghost(ledger: &Ledger, (rows, cols): (usize, usize), source: DType, compute: DType) -> Self {
        let weight = |n: usize, dtype| Tensor::from(Ghost::weight(ledger, n, dtype));
        let (block, code) = (64, [0.0; 16]);
        Self {
            rows,
            cols,
            block,
            packed: weight((rows * cols).div_ceil(2), DType::U8),
            scales: Scales::Plain(weight((rows * cols).div_ceil(block), DType::F32)),
            book: Arc::new(Codebook { code, pairs: Ghost::weight(ledger, (256, 2), DType::F32).into() }),
            source,
            compute,
        }
    }

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

    /// On CUDA, records a tiled product [t, from] -> [t, to]: the tile buffer (`size` is the matrix's
    /// number of values) and, without `sum`, the result.
    fn ghost_cuda(&self, x: &Tensor, to: usize, size: usize, sum: Option<Tensor>) -> Result<Option<Tensor>> {
        let Some(g) = x.ghost().filter(|g| g.ledger().machine().cuda) else { return Ok(None) };
        let tile = (size * self.compute.size_in_bytes()).min(tiles::bytes(x.dim(0)?, None));
        g.ledger().work(Cost { started: 1.0, ..Cost::default() });
        let _tile = g.ledger().role(Role::InFlight, || g.ledger().hold(tile as u64));
        Ok(Some(match sum {
            Some(sum) => sum,
            None => Ghost::new(g.ledger(), (x.dim(0)?, to), x.dtype()).into(),
        }))
    }
}

/// A matrix [rows, cols] in 4-bit quantization blocks.
#[derive(Clone, Debug)]
pub struct QuantizedMatrix {
    rows: usize,
    cols: usize,
    block: usize,
    /// Two codes per byte, the first in the high half: [values / 2, rounded up], u8.
    packed: Tensor,
    scales: Scales,
    book: Arc<Codebook>,
    /// Dtype of the first rounding.
    source: DType,
    /// Dtype of the second rounding, used by products.
    compute: DType,
}

impl QuantizedMatrix {
    /// Assembles a matrix from its parts, on their device.
    ///
    /// # Errors
    /// Part sizes don't match (caller bug: file contents are validated earlier).
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        (rows, cols): (usize, usize),
        block: usize,
        packed: Tensor,
        scales: Scales,
        book: Arc<Codebook>,
        source: DType,
        compute: DType,
    ) -> Result<Self> {
        let n = rows * cols;
        let blocks = n.div_ceil(block.max(1));
        let scales_fit = match &scales {
            Scales::Plain(s) => s.elem_count() == blocks,
            Scales::Nested { codes, map, absmax, group, .. } => {
                codes.elem_count() == blocks
                    && map.elem_count() == 256
                    && *group > 0
                    && absmax.elem_count() == blocks.div_ceil(*group)
            }
        };
        if block < 2 || !block.is_multiple_of(2) || packed.elem_count() != n.div_ceil(2) || !scales_fit {
            candle_core::bail!("4-bit blocks: parts that are not of a matrix {rows} x {cols}, block {block}");
        }
        Ok(Self { rows, cols, block, packed, scales, book, source, compute })
    }

    /// (rows, cols).
    pub fn dims(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Values per quantization block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Dtype of the matrix before quantization; dequantized values are rounded to it first.
    pub fn source_dtype(&self) -> DType {
        self.source
    }

    /// Dtype of dequantized values.
    pub fn dtype(&self) -> DType {
        self.compute
    }

    /// Packed codes, and scales.
    pub fn parts(&self) -> (&Tensor, &Scales) {
        (&self.packed, &self.scales)
    }

    /// The two values of each byte [256, 2], f32. The second values of bytes 0 to 15 form the codebook.
    pub fn pairs(&self) -> &Tensor {
        &self.book.pairs
    }

    /// Bytes of codes and scales, without the maps shared by all matrices of a model.
    pub fn bytes(&self) -> usize {
        let size = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        size(&self.packed)
            + match &self.scales {
                Scales::Plain(s) => size(s),
                Scales::Nested { codes, absmax, .. } => size(codes) + size(absmax),
            }
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
        if let Some(y) = self.ghost_cuda(x, self.rows, self.rows * self.cols, None)? {
            return Ok(y);
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
        if let Some(y) = self.ghost_cuda(xu, self.rows, size, None)? {
            return Ok(y);
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
        if dydu.ghost().is_some_and(|g| g.ledger().machine().cuda) {
            let y = self.ghost_cuda(dydu, self.cols, size, dx)?;
            return y.ok_or_else(|| candle_core::Error::msg("no ghost"));
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
        if dy.ghost().is_some_and(|g| g.ledger().machine().cuda) {
            let y = self.ghost_cuda(dy, self.cols, self.rows * self.cols, dx)?;
            return y.ok_or_else(|| candle_core::Error::msg("no ghost"));
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
        if let Some(g) = self.packed.ghost().filter(|g| g.ledger().machine().cuda) {
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
        if let Some(g) = self.packed.ghost().filter(|g| g.ledger().machine().cuda) {
            return Padded::within(Ghost::new(g.ledger(), shape, self.compute).into(), dims);
        }
        #[cfg(feature = "cuda")]
        if rank > 0 && cuda::dequantizes(self) {
            return Padded::within(cuda::dequantize(self, 0..self.rows, (rank, shape.1))?, dims);
        }
        Padded::of(&self.dequantize()?)
    }
}

#[cfg(test)]
mod host_tests;
#[cfg(test)]
mod tests;
