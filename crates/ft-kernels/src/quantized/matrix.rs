//! Storage of a matrix in 4-bit quantization blocks.

use crate::Tensor;
use crate::ledger::Ledger;
use crate::tensor::Ghost;
use candle_core::{DType, Device, Result};
use std::sync::Arc;

/// The 16 code values, shared by all matrices of a model.
#[derive(Debug)]
pub struct Codebook {
    pub(super) code: [f32; 16],
    /// The two values of each byte [256, 2], f32.
    pub(super) pairs: Tensor,
}

impl Codebook {
    /// A codebook of 16 values on `device`.
    pub fn new(code: [f32; 16], device: &Device) -> Result<Self> {
        let pairs: Vec<f32> = (0..256usize).flat_map(|b| [code[b >> 4], code[b & 15]]).collect();
        Ok(Self { code, pairs: Tensor::from_vec(pairs, (256, 2), device)? })
    }
}

/// The 256 ascending values of bitsandbytes' dynamic map, equal to the bit: seven decades up to 1, each with twice as
/// many values as the decade below, plus 0 and 1. Those of a `signed` map have either sign; others are twice as many
/// (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022).
pub fn dynamic_map(signed: bool) -> [f32; 256] {
    let mut map = vec![0.0, 1.0];
    for i in 0..7 {
        let intervals = if signed { 1usize << i } else { 2 << i };
        let scale = 10f64.powi(i - 6) as f32;
        // torch.linspace(0.1, 1, intervals + 1) counts from the nearer end and rounds once.
        let step = (1.0f32 - 0.1f32) / intervals as f32;
        let at = |k: usize| {
            if k < intervals.div_ceil(2) {
                step.mul_add(k as f32, 0.1)
            } else {
                (-step).mul_add((intervals - k) as f32, 1.0)
            }
        };
        for k in 0..intervals {
            let mean = scale * ((at(k) + at(k + 1)) / 2.0);
            map.push(mean);
            if signed {
                map.push(-mean);
            }
        }
    }
    map.sort_by(f32::total_cmp);
    std::array::from_fn(|i| map[i])
}

/// Scales of the quantization blocks: tensors, or their values on the CPU.
#[derive(Clone, Copy, Debug)]
pub enum Scales<B = Tensor, F = Tensor> {
    /// `[blocks]`, f32.
    Plain(F),
    /// Double quantization: `map[codes[b]] * absmax[b / group] + offset`.
    Nested {
        /// `[blocks]`, u8.
        codes: B,
        /// `[256]`, f32.
        map: F,
        /// `[groups]`, f32.
        absmax: F,
        /// Scales per group.
        group: usize,
        /// Mean of the scales.
        offset: f32,
    },
}

/// A matrix [rows, cols] in 4-bit quantization blocks.
#[derive(Clone, Debug)]
pub struct QuantizedMatrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) block: usize,
    /// Two codes per byte, the first in the high half: [values / 2, rounded up], u8.
    pub(super) packed: Tensor,
    pub(super) scales: Scales,
    pub(super) book: Arc<Codebook>,
    /// Dtype of the first rounding.
    pub(super) source: DType,
    /// Dtype of the second rounding, used by products.
    pub(super) compute: DType,
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

    /// Largest magnitude of a code value.
    pub fn largest_code(&self) -> f32 {
        self.book.code.iter().fold(0.0, |most, c| most.max(c.abs()))
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
}
